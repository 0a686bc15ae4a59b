"""The sequence as a parallel dimension: cores of attention, rings, all-to-alls, and their hybrids."""
