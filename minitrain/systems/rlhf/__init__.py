"""Learning from rewards: four models, and who has which devices when.

First  policy_losses      advantages and losses of GRPO and PPO
Then   rollouts           the models on ranks, their iterations, the hybrid engine
       adapters           thin matrices that train beside frozen ones, in 4 bits too
Last   model_placements   memory, calls on lanes, orders, a plan for each call
"""
