"""How collectives are made of messages, and what they cost on one and on many levels of network.

First  chunk_schedule      an algorithm as data: who sends which chunks to whom
       check               its proof, without a process
       interpreter         real tensors do on real ranks what a schedule says; all-to-alls
then   algorithms          ring, direct exchange, binomial tree, halving and doubling
       tree                the double binary tree
       hierarchical        several levels of network
       locality            who are neighbours, found by probing
       cost_model          seconds on a described network
       selector            which algorithm for how many bytes
"""
