"""Searches for a plan, all of the same problem.

First  problem             layers, levels of devices, words; seconds and bytes of a choice
       stages              plans with stages; every plan there is
       exhaustive          the truth
then   optcnn, tensoropt
"""
