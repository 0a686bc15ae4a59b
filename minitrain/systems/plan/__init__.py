"""Planners of the survey: each a search or a formula. No torch.

First  dapple, autopipe    where to cut a pipeline
       memory_balance, adapipe, mpress   by memory: mCAP; what to recompute; where each tensor waits
       dynapipe, graphpipe, trirace      unequal samples; models with branches; old weights
       schedule_search, tessel           the shortest schedule there is; a pattern that repeats
       expert_placement   which ranks hold which experts: shadows, replicas, placements
       expert_popularity, expert_pools   placed by popularity in inference; plans that switch by placement
       rematerialize      what to compute again: any graph, exactly (Checkmate)
       chain_search, revolve             of a chain: exactly within bytes; by binomials
       recompute_front, recompute_windows   what a layer keeps, bytes against time; behind messages (Lynx)
       tensor_split       operators in parts of the batch, results kept or made again, under a budget
       operator_order, memory_layout     the order that needs least memory; where every tensor lies
       search/            searches of automatic parallelism, all on one problem
       casts              which operators are worth 16 bits, casts counted
       mesh_traffic       what each axis of a mesh sends, per rank and step
       grid_costs, grid_choice           what the matrices of a layer cost on a grid; the fastest that fits
       offload, mobius    how much goes to the host or to disks; pipelines whose stages come from the host
       expert_overlap, expert_pair       hiding the all-to-alls of experts: in one layer; of two microbatches
       infinity           what ZeRO-Infinity needs of GPU, CPU and disk, and how fast
       stronghold         the smallest window of layers that hides their transfers
       checkpoint_interval   how often to save: Young, Daly, exactly; to two levels; CheckFreq
       checkpoint_placement  whose memory keeps whose state, and what failures leave: Gemini, REFT
"""
