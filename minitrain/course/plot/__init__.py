"""Every picture of the course.

First  charts              what each rank does when, what fills its memory when, and the curves
       data_parallel       who keeps what, when gradients travel, loss against their bytes
       schematics          ideas before code: boxes, arrows, a ring and two trees
       cuts                how a cut is found, what its stages recompute, lend and pad
       pipeline_charts     schedules, the way of one microbatch, what repeats for each, what memory buys
       pipeline_svg        the same schedules as SVG, drawn in hundredths of a second
       expert_charts       where tokens go, loads of experts and of ranks
       grids               blocks of matrices on grids of ranks, shards on a ring
       attention           tiles of scores, an online softmax, units of a chip, a roofline
       sharding_charts     who holds which part of each model state
       tensor_parallel     which slices of a layer a rank holds, and what flows through it
       sequence_charts     who holds which tokens, who computes which score
       precision           what a format can say, what a narrow sum loses, whose scale an outlier sets
       recompute_charts    what is held and what runs again, action by action
       mesh_charts         groups of a mesh in their nodes, who sends to whom, what an order costs
       memory_charts       copies on links, memory with and without, what bytes cost in time
       address_space       where every block of memory lies, and the holes
       searches            how much of its space each planner looked at
       checkpoints         what an interval wastes, a save beside training, who keeps whose state
       fault_charts        where detectors listen, who is slow, what a death finds
       network_charts      who meets on a cable, an all-reduce on many networks
       cluster_charts      who has which devices, or a link, when
       kernel_charts       blocks that programs touch, loads beside products, seconds by size of tile
       report_charts       what a report's numbers have to do with each other, predicted over published
beside style               one palette named by meaning, one style
       controls            sliders and menus above a picture that follows them
       svg                 words, axes and legends of the pictures that widgets draw at every drag
       plan_svg            a predicted step as SVG: memory of every stage, time by part
       pipeline_widget     drag a schedule's sizes and costs
       recompute_widget    drag a chain's length and what may be held
       plan_widget         drag a layout: what fits, and what a step of it takes
"""
