"""Mixture of experts: a layer of many MLPs in which each token visits few.

First  router     where each token goes: a pure function of its scores, and the losses that keep it balanced
"""
