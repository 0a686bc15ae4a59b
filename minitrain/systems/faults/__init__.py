"""Failures, made on purpose and found; and training that goes on.

chaos        a plan of faults in one line, injected at named points of a real run
survive      when ranks die and when others come: a vote commits each step
live         a checkpoint that is nowhere: pieces from ranks to ranks, any layout to any other
copies       each rank's share once more at its neighbour
"""
