"""What training keeps in memory, and ways to keep less: one file an idea.

First  saved_tensors       what autograd keeps, and for whom
"""
