"""Described machines, and what moves on them takes. No torch.

First  machines            devices and links, from datasheets
       collectives         what a collective costs
"""
