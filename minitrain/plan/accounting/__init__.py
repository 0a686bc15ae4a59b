"""What training costs, as formulas (no torch): parameters, compute, memory_formulas, traffic in bytes."""
