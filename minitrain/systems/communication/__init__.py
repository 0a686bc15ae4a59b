"""How collectives are made of messages, and what they cost on one and on many levels of network.

First  ring_algorithms     reduce-scatter and all-gather as plain loops
       chunk_schedule      an algorithm as data: who sends which chunks to whom
       check               its proof, without a process
       interpreter         real tensors do on real ranks what a schedule says
then   algorithms          ring, direct exchange, binomial tree
       halving, tree       recursive halving and doubling; the double binary tree
       hierarchical        several levels of network
       cost_model, selector      seconds on a described network; which algorithm for how many bytes
beside all_to_all          a block from everyone for everyone
       locality            who are neighbours, found by probing
"""
