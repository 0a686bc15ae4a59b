"""What training costs, as formulas: one file a quantity, plain numbers in and out, no torch."""
