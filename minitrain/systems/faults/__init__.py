"""Failures, made on purpose and found; and training that goes on.

chaos        a plan of faults in one line, injected at named points of a real run
detect       who is silent, slow or somewhere else; which link; from when on steps are longer
corruption   numbers that are wrong and fail nothing: replay, checksums of replicas, sums of products
survive      when ranks die and when others come: a vote commits each step
watched      that, with saves and weights compared before each step, and a log of who was lost and why
live         a checkpoint that is nowhere: pieces from ranks to ranks, any layout to any other; copies of them
reroute      work of a lost worker goes to peers, a neighbour or whoever is free: ReCycle, Bamboo, SWARM
templates    pipelines for every number of nodes (Oobleck); the layout to be in (Parcae)
validation   tests before jobs: SuperBench, TPUv4; whose the machines are that are left (Unicron)
"""
