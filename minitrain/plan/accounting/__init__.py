"""What training costs, as formulas: plain numbers, no torch: parameters, compute, memory_formulas, traffic."""
