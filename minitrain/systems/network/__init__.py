"""Networks as graphs and as queues, and what traffic does on them.

First  graph         hosts, switches and cables; routes; what a flow or a whole schedule loads on every cable
       topologies    from NVLink meshes to fat trees, Dragonflies, rails and tori, each in a few lines
Then   packings      cuts, spanning trees and rings that share no cable, sums inside the network
       balancing     what hashing flows to paths costs, and its cures
       optical       wavelengths, and rings chosen together with the strategy
Last   packets       ports, flows and events: queues, marks, pauses, losses, order
       congestion    laws of congestion control
       aggregation   switches that add
"""
