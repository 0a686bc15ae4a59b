"""What a caller of planners, simulators and commands gets who does not say: chapters, docstrings and the figures of
papers rest on these numbers.
"""

import importlib
import inspect

# module, function or class, and what its parameters are by themselves
DEFAULTS = """
plan_command plan model='llama3-70b' machine='h100' ranks=512 batch=1024 length=8192 stack='megatron-2023' precision='bfloat16_main_grads' room=0.9 top=5 explain=False
replay_command replay machine='h100' fused_optimizer=True compute_efficiency=0.7 memory_efficiency=0.9 network_efficiency=0.8
train_command train preset='tiny' report_every=25 every=100 keep=2 beside=False resume=False sample=200
training.hyperparameters Hyperparameters steps=1000 batch_size=8 length=128 lr=0.003 weight_decay=0.1 clip=1.0 seed=0
strategy Strategy order='dp-pp-cp-tp' ep_travel='tokens' ep_shadow=0 zero=0 sequence_parallel=False overlap=False schedule='1f1b' microbatches=1 recompute='none' core='ring' layout='zigzag' precision='float32' products='plain' loss_scale=0.0 loss_scale_window=2000 bucket_bytes=25000000 offload='none' delayed_update=False
plan.accounting.compute forward_flops_per_token causal='triangle'
plan.accounting.compute flops_per_token causal='triangle' recompute=False
plan.accounting.compute training_days flops_per_parameter=6
plan.accounting.memory model_state_bytes weight=2 gradient=2 optimizer=12
plan.accounting.memory zero_bytes weight=2 gradient=2 optimizer=12
plan.accounting.memory checkpoint_bytes weight=2 optimizer=12
plan.accounting.memory Term sbh=0 ass=0 core=False cut=True
plan.accounting.memory activation_bytes tensor_parallel=1 sequence_parallel=False recompute='none'
plan.accounting.memory latent_attention_bytes_per_token recompute=False element_bytes=2
plan.accounting.parameters attention_parameters matrices_only=False
plan.accounting.parameters mlp_parameters matrices_only=False
plan.accounting.parameters active_parameters token_table=True
plan.accounting.traffic zero3_bytes_per_step element_bytes=2
plan.accounting.traffic tensor_parallel_bytes_per_step element_bytes=2
plan.autopipe sliced k=1
plan.autopipe sliced_times F=1 B=2
plan.autopipe slices_needed F=1 B=2
plan.casts block_graph heads=1
plan.checkpoint_interval expected_s restart_s=0.0
plan.checkpoint_interval waste restart_s=0.0
plan.checkpoint_interval checkfreq_steps budget=0.035
plan.checkpoint_interval CheckFreq budget=0.035 window=5
plan.checkpoint_placement interleave parts=4 latency_s=0 used=1
plan.dapple Stage sync=0
plan.dapple Ahead rest=0 first=0 all=0
plan.expert_overlap pipemoe_degree most=16
plan.expert_pair Layer dtype='bfloat16'
plan.expert_pair Log.compute without=0
plan.expert_pair pair_events layers=1
plan.expert_pair pair_timeline layers=1
plan.expert_placement costs_of matrices=2 dtype='bfloat16'
plan.expert_placement shadowed matrices=2
plan.expert_placement layerwise hidden=True
plan.expert_placement flexmoe threshold=1.1 most=64
plan.expert_placement switched states=7
plan.expert_pools switch_s states=7
plan.expert_pools chosen states=7
plan.fleet least_ranks stage=3
plan.graphpipe GraphSchedule slices=1
plan.grid_choice seconds element_bytes=2
plan.grid_choice table weight_bytes=16 element_bytes=2
plan.grid_choice cheapest memory_bytes=inf
plan.grid_costs Grid depth=1
plan.grid_costs crossover path=False backward=False most=1048576
plan.infinity Shape.checkpoint_bytes batch=32 length=1024 every=1
plan.infinity Shape.working_bytes tiles=1
plan.infinity Shape.activation_bytes batch=32 length=1024 every=1
plan.infinity flops_per_byte width=0 every=1
plan.memory_layout annealed steps=2000 seed=0
plan.mesh_traffic sent_by_axis stage=0
plan.mobius tasks prefetch=True
plan.mobius makespan prefetch=True
plan.mpress plan_mpress ways=('keep','recompute','peer','host')
plan.offload Server host_bytes=0
plan.offload fuyou_s overlapped=True
plan.operator_order least_memory most_states=100000
plan.operator_order laid_out steps=500 seed=0
plan.planner Task precision='bfloat16_main_grads' room=0.9
plan.planner search keep=5
plan.planner why most=3
plan.predict.fit fit tolerance=0.01 hold=0.01
plan.predict.pipeline Costs message_s=0.0 blocking=False
plan.predict.rates Rates products=1.0 attention=1.0 memory=1.0 nvlink=1.0 network=1.0 tile=1 k0=0
plan.predict.run Stack name='megatron-2021' fused=True adds_in_products=False flash=False p2p_overlapped=False scattered=True tp_overlapped=False dp_overlapped=False whole_again=True each_microbatch=False buckets_apart=False dp_inside_pp=True
plan.predict.work Operator accumulates=False
plan.predict.work Pass high_bytes=0
plan.predict.work Layer kept_bytes=0 parameters=0 shared_parameters=0 waiting_bytes=0
plan.predict.work Work expert_parameters=0
plan.recompute_front Unit needed=True
plan.recompute_windows Task first=0 last=-1
plan.rematerialize Node scratch=0
plan.schedule_search shortest split=False span=False most=2000000
plan.schedule_search Search states=0
plan.search.aceso aceso hops=3 width=20
plan.search.alpa intra memory_bytes=inf
plan.search.autoddl autoddl starts=20 seed=0
plan.search.automap automap rollouts=200 seed=0 explore=0.5
plan.search.autotuning sent_bytes element_bytes=4
plan.search.autotuning step_seconds launch_s=0.0001
plan.search.exhaustive exhaustive unit='seconds'
plan.search.exhaustive every memory_bytes=inf
plan.search.flexflow flexflow steps=2000 seed=0
plan.search.galvatron words_of_tree mixed=False
plan.search.galvatron candidates mixed=False
plan.search.galvatron tree_options again=(False,)
plan.search.nnscaler Operator bytes=0
plan.search.nnscaler op_trans aligned=True
plan.search.nnscaler pipeline_program microbatches=2
plan.search.optcnn optcnn unit='seconds'
plan.search.placement reinforce steps=100 batch=16 rate=0.7 seed=0
plan.search.problem Layer keeps=0
plan.search.problem Option again=False
plan.search.problem cheapest memory_bytes=inf
plan.search.problem Problem memory_bytes=inf microbatches=1 words=('dp','sdp','col','row') ends='rows' element_bytes=4 state_bytes=16
plan.search.problem Problem.memory in_flight=1
plan.search.problem Problem.graph unit='seconds' in_flight=1
plan.search.problem Problem.cost unit='seconds'
plan.search.problem Graph.every cost=0.0 size=0.0
plan.search.stages cuts start=0
plan.search.tensoropt frontier cap=inf
plan.search.tofu graph_of steps=1
plan.search.unity Rates launch_s=0.0 element_bytes=4
plan.search.unity optimize most=3000 slack=3.0
plan.stronghold stalls one_link=True
plan.stronghold smallest_window one_link=True
plan.stronghold hides one_link=True
plan.tensor_split Work launch=0.0
plan.tessel repetend split=False most=500000
plan.tessel completed most=100000
plan.trirace period ahead=1
simulate.allocator_rules Settings expandable_segments=False garbage_collection_threshold=0.0 roundup_power2_divisions=0
simulate.allocator_rules rounded divisions=0
simulate.checkpoint_pipeline Way chunks=1 buffers=1 by_layer=False hot=0
simulate.checkpoint_pipeline fastpersist buffers=2
simulate.checkpoint_pipeline train every=1 move_s=0
simulate.collectives chosen algorithm='auto'
simulate.collectives seconds algorithm='auto'
simulate.events Compute written=0
simulate.eviction Evictor limit_bytes=inf rule='dtr'
simulate.eviction_addresses BestFit rule='dtr'
simulate.eviction_addresses MegTaiChi rule='dtr'
simulate.eviction_addresses Coop cheap=6.0
simulate.eviction_traces chain bytes=1 cost=1 every=0
simulate.failures Level restart_s=0.0 lag_s=0.0
simulate.failures failing machines=1 shape=1.0 together=1
simulate.failures simulate every=1
simulate.intervals join gap=0.0 keep=inf
simulate.machines Device multiprocessors=1
simulate.machines Machine compute_efficiency=1.0 memory_efficiency=1.0 network_efficiency=1.0
simulate.machines this_laptop ranks=4
simulate.replay replay launch_s=0.0 sharing=True
simulate.storage autoscale trial_every=10
simulate.swaps swap_volume writes_all=False peers=True
simulate.tiers Layer dense_bytes=0 host_bytes=0 disk_bytes=0
simulate.tiers prefetching known=True
simulate.tiers DecayingLFU decay=0.5 every=100
simulate.tiers Sizes states=12 gradient=4 parameter=2
simulate.tiers updating chunks=1
simulate.timeline Timeline.mfu dtype='bfloat16'
simulate.traffic_matrix traffic way='ring'
annotate.scheduled stages name='layers'
"""


def test_what_a_parameter_is_by_itself():
    for line in DEFAULTS.strip().splitlines():
        module, path, *said = line.split()
        found = importlib.import_module(f"minitrain.{module}")
        for name in path.split("."):
            found = getattr(found, name)
        known = {name: one.default for name, one in inspect.signature(found).parameters.items()}
        assert said == [
            f"{one.split('=')[0]}={known[one.split('=')[0]]!r}".replace(" ", "") for one in said
        ], line


def test_limits_and_rates_that_are_said_nowhere_else():
    from minitrain.cli import plan_command, replay_command
    from minitrain.plan import fleet, planner
    from minitrain.plan.predict import fit, rates

    assert (planner.LEAST_TOKENS, planner.MOST_ROWS, planner.MOST_CHUNKS) == (2048, 8, 8)
    assert (plan_command.MOST_TRIED, replay_command.DRAWN, fit.LEAST) == (500, 16, 0.05)
    assert fleet.STATES == (2, 2, 12)
    shares = dict(attention=0.6, memory=0.8, nvlink=0.75, tile=128, k0=128)
    assert rates.START == rates.Rates(products=0.8, network=0.5, **shares)
    assert rates.RATES == rates.Rates(products=0.76, network=0.3, **shares)
    assert rates.PLAIN == rates.Rates(1, 1, 1, 1, 1, 1, 0)
