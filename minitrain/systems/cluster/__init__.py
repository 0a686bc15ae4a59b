"""The cluster around the job: who gets which devices, and when. Policies on one simulator of events.

First  jobs             jobs, nodes, events, a trace
       orders           pod by pod, gangs in an order, two jobs on the same devices
Then   fair_shares      shares of devices of several kinds: linear program, rounds, trade
       fragments        parts of GPUs, and what nobody can use of them
       elastic          how many devices, of which kind, with which plan
       resources        CPUs, switches, a dispatcher, evaluations
Last   energy           of pipelines, of batch sizes and power limits
       trials           learning rates for wide models from narrow ones, all at once, in bubbles
       shared_storage   straws, stripes, bursts, caches
"""
