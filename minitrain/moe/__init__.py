"""Mixture of experts: a layer of many MLPs in which each token visits few.

Page   first      the technique on 80 lines of plain torch
First  router     where each token goes: a pure function of its scores, and the losses that keep it balanced
then   dispatch   tokens to the ranks of their experts and back, over ep and tp
       experts    the work on rows that stand sorted by expert: in several ways, one backward by hand
"""
