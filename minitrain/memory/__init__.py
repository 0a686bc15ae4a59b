"""What training keeps in memory, and ways to keep less: one file an idea."""
