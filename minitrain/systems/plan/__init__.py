"""Planners of the survey: each a search or a formula. No torch.

First  stage_cuts         where to cut a pipeline: DAPPLE, AutoPipe, GraphPipe
       stage_memory       under a cap of bytes: AdaPipe, mCAP, MPress
       dynapipe           unequal samples, one-way messages: DynaPipe, TriRace
       schedule_search    the shortest schedule there is; a pattern that repeats (Tessel)
       expert_placement   which ranks hold which experts: FasterMoE, Prophet, FlexMoE
       expert_pools       the same before loads are known, from samples: SmartMoE, Lina
       expert_overlap     hiding their all-to-alls: PipeMoE, ScheMoE, Lina, MPipeMoE, DeepSeek-V3
       communication_order   what is sent when: Poseidon, P3, TicTac, ByteScheduler, PACE, DeAR, CoCoNet
       communication_search  tuners and placements: ByteScheduler, Syndicate, Centauri, P^2
       shared_wires       traffic that meets: PCIe trees, saves beside sums, CASSINI
       rematerialize      what to keep and what to compute again: Yuan, Lynx, Checkmate, revolve
       integer_program    rows over variables with names, for those that need a solver
       memory_layout      the order that needs least memory (ROAM); where every tensor lies
       offload            what goes to the host or disks: Elixir, Fuyou, ZeRO-Infinity, STRONGHOLD, Mobius
       checkpoint_interval   how often to save; whose memory has whose state
       casts              which operators are worth 16 bits, casts counted (Campo)
       sharding_choices   which states to cut over which ranks: PaRO, AMSP
       mesh_traffic       what each axis of a mesh sends, per rank and step
       grid_costs         what the matrices of a layer cost on a grid
       clusters           the fewest ranks, and the fleet that is done first
       published          published runs with their step times: what predictions are held to
       search/            searches of automatic parallelism, all on one problem
       emit/              a plan as configuration of Megatron-LM, DeepSpeed and torchtitan, and back
"""
