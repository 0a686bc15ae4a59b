"""The account of a run: bytes sent, FLOPs spent, memory held, in order. Real and dry runs write the same one.

First  ledger              Ledger: open it around what is to be counted
then   operators           sees every operator; what one costs: FLOPs and shapes of products and attention
       memory_meter        every block of memory from birth to death

This folder is one module to its users: `from minitrain.ranks.ledger import Ledger`.
"""
# ruff: noqa: F401

from minitrain.ranks.ledger.ledger import Ledger
