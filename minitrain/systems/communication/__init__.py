"""How collectives are made of messages, and what they cost on one and on many levels of network.

First  chunk_schedule      an algorithm as data: who sends which chunks to whom, and its proof
       interpreter         real tensors do on real ranks what a schedule says; all-to-alls
then   algorithms          ring, direct exchange, trees, halving and doubling; several levels of network
       synthesis           programs of chunks that become schedules; schedules found by search
       cost_model          seconds on a described network; which algorithm for how many bytes
"""
