"""Matrices in blocks on grids of ranks.

First  summa               the product of two matrices that no rank holds whole
then   optimus             a Transformer's layer on a q x q grid, or on d copies of it (Tesseract)
       cube                three dimensions
"""
