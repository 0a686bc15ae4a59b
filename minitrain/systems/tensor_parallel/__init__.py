"""Matrices over ranks, as further systems cut them.

First  summa      the product of two matrices that no rank holds whole: SUMMA, Cannon
then   optimus    a Transformer's layer on a q x q grid, or on d copies of it (Tesseract)
       cube       three dimensions
       rotated    weights go round, activations stay (RTP)
beside random     streams of random numbers that agree, or differ (Megatron-LM)
"""
