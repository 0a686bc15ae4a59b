"""Mixture of experts: a layer of many MLPs in which each token visits few.

First  router     where each token goes: a pure function of its scores, and the losses that keep it balanced
then   dispatch   tokens to the ranks of their experts and back
       parallel   a layer of experts (model/mixture.py) over the ranks of ep and tp
       experts    the work on rows that stand sorted by expert, in several ways
       turns      one expert after the other, forward and backward by hand
       two_level  dispatch and all-to-all over nodes: what crosses between them crosses once
       move_experts  experts to the tokens, and their gradients home
       travel     which of these a layer takes: set once, or decided in each step
beside balance    busy experts on several ranks: copies, replicas, one layout for many plans
       topology   a balance loss that knows which links are fast
       overlap    a layer in parts: some rows travel while experts work on others
       pair       two microbatches: one travels while the other computes
"""
