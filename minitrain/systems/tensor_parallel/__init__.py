"""Matrices over ranks, as further systems cut them.

grids     products on grids of ranks: Cannon, SUMMA, 2.5D, 3D
rotated   weights go round, activations stay (RTP)
"""
