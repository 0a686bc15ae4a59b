"""What training costs, as formulas: plain numbers in and out, no torch. A file a quantity: parameters, compute, memory, traffic ("bytes sent")."""
