"""Learning from rewards: four models, and who has which devices when.

policy            losses of GRPO and PPO, their iterations on ranks, the hybrid engine
adapters          thin matrices that train beside frozen ones, in 4 bits too
model_placements  memory, calls on lanes, orders, a plan for each call
"""
