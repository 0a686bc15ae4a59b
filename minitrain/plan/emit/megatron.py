"""Megatron-LM: a plan as the arguments of pretrain_gpt.py, and such a command as a plan.

    written = write(job, node=8)    torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --bf16 ..
    job, left = read(text)          left: options that say nothing of a plan (--lr, --save, ..)

Data parallelism is what is left of the ranks, so the launcher's number of ranks is part of the plan. What
Megatron-LM has no word for is refused or noted (`SYSTEM`): of its schedules there are 1F1B and interleaved
1F1B, of layouts of a sequence the zigzag, of ZeRO its distributed optimizer and Megatron-FSDP. Experts in
the blocks that --moe-layer-freq lists. The version is that of options.tsv. No torch.
"""

from __future__ import annotations

import shlex

from minitrain.plan.emit.megatron_model import BLOCKS, NEEDED
from minitrain.plan.emit.table import (
    Cases,
    Made,
    Options,
    Same,
    System,
    Written,
    check_option,
    check_stages,
    flag,
    known,
    rows_of_microbatch,
)
from minitrain.plan.emit.training_job import Job, Values, torchrun
from minitrain.precision.policies import FIRST_SCALE
from minitrain.ranks.checks import require_text

PAD = "--make-vocab-size-divisible-by"
RANKS = "WORLD_SIZE"  # from the environment, by the launcher
LAUNCHER = {"--nproc-per-node", "--nnodes", "--nproc_per_node"}  # of torchrun, whose product it is


def _dp(options: Options, values: Values) -> Values:
    others = values["tp"] * values["pp"] * values["cp"]
    ranks = options.get(RANKS, others)
    if ranks % others:
        raise ValueError(
            f"{ranks} ranks are no multiple of tp · pp · cp = {others}; start as many or other sizes"
        )
    return {"dp": ranks // others}


def _vocabulary(options: Options, values: Values) -> Values:
    """The table has so many rows: padded for all ranks of tp."""
    unit = options.get(PAD, 128) * values["tp"]
    return {"vocab_size": -(-options["--vocab-size"] // unit) * unit}


def _write_batch(values: Values) -> Options:
    return {"--micro-batch-size": rows_of_microbatch(values), "--global-batch-size": values["rows"]}


def _batch(options: Options, values: Values) -> Values:
    micro = options.get("--micro-batch-size", 1)
    rows = options.get("--global-batch-size", micro * values["dp"])
    if rows % (micro * values["dp"]):
        sizes = f"--global-batch-size {rows} and --micro-batch-size {micro} on dp={values['dp']} ranks"
        raise ValueError(f"{sizes}; the first is a multiple of the other two")
    return {"rows": rows, "microbatches": rows // (micro * values["dp"])}


FSDP = {"--use-distributed-optimizer": True, "--use-megatron-fsdp": True}
SHARDED, COPIES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
ZERO = {0: {}, 1: {"--use-distributed-optimizer": True}, 2: FSDP | {SHARDED: "optim_grads"}}
ZERO |= {3: FSDP | {SHARDED: "optim_grads_params"}}


def _write_zero(values: Values) -> Options:
    if values["zero"] == "III" and values["nodes"] == 1:
        return ZERO[3] | {COPIES: values["dp"] // values["node"]}
    return ZERO.get(values["zero"], {})


def _zero(options: Options, values: Values) -> Values:
    copies = options.get(COPIES, 1)
    if options.get("--use-megatron-fsdp") and options.get(SHARDED) == "optim_grads_params" and copies > 1:
        return {"zero": "III", "node": values["dp"] // copies}
    if copies > 1:
        raise ValueError(f"{COPIES} {copies} without Megatron-FSDP's optim_grads_params: no zero does this")
    return Cases(("zero",), [((zero,), theirs) for zero, theirs in ZERO.items()]).read(options, values)


VIRTUAL, PER_STAGE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"


def _write_pipeline(values: Values) -> Options:
    chunks = values["chunks"] if values["schedule"] == "interleaved" else 1
    check_stages(values, chunks, "Megatron-LM")
    more = {VIRTUAL: chunks} if values["schedule"] == "interleaved" else {}
    return {"--pipeline-model-parallel-size": values["pp"]} | more


def _pipeline(options: Options, values: Values) -> Values:
    pp = options.get("--pipeline-model-parallel-size", 1)
    chunks = options.get(VIRTUAL, 0)
    if layers := options.get(PER_STAGE):
        chunks = values["num_layers"] // (pp * layers)
    return {"pp": pp} | ({"schedule": "interleaved", "chunks": chunks} if chunks else {})


CORES = {"ring": "p2p", "ulysses": "a2a", "gathered": "allgather", "usp": "a2a+p2p"}


def _write_context(values: Values) -> Options:
    cp, core, ulysses = (values[name] for name in ("cp", "core", "ulysses"))
    if cp == 1 or core not in CORES:
        return {"--context-parallel-size": cp}
    levels = {"--hierarchical-context-parallel-sizes": [ulysses, cp // ulysses]} if core == "usp" else {}
    return {"--context-parallel-size": cp, "--cp-comm-type": [CORES[core]]} | levels


def _context(options: Options, values: Values) -> Values:
    cp, (kind, *more) = options.get("--context-parallel-size", 1), options.get("--cp-comm-type", ["p2p"])
    core = next((core for core, word in CORES.items() if word == kind), None)
    if more or core is None:
        raise ValueError(f"--cp-comm-type {kind} {' '.join(more)}: use one of {', '.join(CORES.values())}")
    sizes = options.get("--hierarchical-context-parallel-sizes", [1])
    return {"cp": cp} | ({"core": core, "ulysses": int(sizes[0]) if core == "usp" else 1} if cp > 1 else {})


WHAT, HOW, MANY = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"


def _write_recompute(values: Values) -> Options:
    kind, _, number = values["recompute"].partition(":")
    if kind == "selective":
        return {WHAT: "selective"}
    if kind == "full" or kind == "every":
        return {WHAT: "full", HOW: "uniform", MANY: int(number or 1)}
    return {}


def _recompute(options: Options, values: Values) -> Values:
    what, modules = options.get(WHAT), options.get("--recompute-modules", ["core_attn"])
    if what == "selective" or options.get("--recompute-activations"):
        if modules != ["core_attn"]:
            raise ValueError(
                f"--recompute-modules {' '.join(modules)}: of these only core_attn has a word here"
            )
        return {"recompute": "selective"}
    if what == "full":
        if (how := options.get(HOW)) != "uniform":
            raise ValueError(f"{HOW} {how}: use uniform; a number of blocks of each stage has no word here")
        number = options.get(MANY, 1)
        return {"recompute": "full" if number == 1 else f"every:{number}"}
    return {}


def _write_scale(values: Values) -> Options:
    if values["precision"] != "float16":
        return {}
    scale = {"--initial-loss-scale": float(values["loss_scale"] or FIRST_SCALE)}
    return scale | {"--loss-scale-window": float(values["loss_scale_window"])}


def _scale(options: Options, values: Values) -> Values:
    if values["precision"] != "float16":
        return {}
    scale = options.get("--initial-loss-scale", 2.0**32)
    window = int(options.get("--loss-scale-window", 1000))
    return {"loss_scale": 0.0 if scale == FIRST_SCALE else scale, "loss_scale_window": window}


FP8, RECIPE, HISTORY = "--fp8-format", "--fp8-recipe", "--fp8-amax-history-len"
MOMENTS = {"--use-precision-aware-optimizer": True, "--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"}
IN_FP32 = {"--bf16": True, "--accumulate-allreduce-grads-in-fp32": True}

SYSTEM = System(
    "megatron",
    rows=[
        *BLOCKS,
        Same("length", "--seq-length", None),
        Same("tp", "--tensor-model-parallel-size", 1),
        Same("ep", "--expert-model-parallel-size", 1),
        Made(
            ("pp", "chunks", "schedule"),
            ("--pipeline-model-parallel-size", VIRTUAL, PER_STAGE),
            _write_pipeline,
            _pipeline,
        ),
        Made(
            ("cp", "core"),
            ("--context-parallel-size", "--cp-comm-type", "--hierarchical-context-parallel-sizes"),
            _write_context,
            _context,
        ),
        Cases(("order",), [(("dp-pp-cp-tp",), {"--use-tp-pp-dp-mapping": True}), (("pp-dp-cp-tp",), {})]),
        Made(("dp",), (RANKS,), lambda v: {RANKS: v["dp"] * v["tp"] * v["pp"] * v["cp"]}, _dp),
        Made(("rows", "microbatches"), ("--micro-batch-size", "--global-batch-size"), _write_batch, _batch),
        Made(("zero", "node"), (*ZERO[3], COPIES), _write_zero, _zero),
        Cases(
            ("sequence_parallel", "overlap"),
            [
                ((False, False), {}),
                ((True, False), {"--sequence-parallel": True}),
                ((True, True), {"--sequence-parallel": True, "--tp-comm-overlap": True}),
            ],
        ),
        Made(
            ("recompute",),
            (WHAT, HOW, MANY, "--recompute-activations", "--recompute-modules"),
            _write_recompute,
            _recompute,
        ),
        flag("recompute_partition", "--distribute-saved-activations"),
        Cases(
            ("precision",),
            [
                (("float32",), {}),
                (("bfloat16",), {"--bf16": True, "--grad-reduce-in-bf16": True}),
                (("bfloat16_main_grads",), IN_FP32),
                (("bfloat16_main_grads",), {"--bf16": True}),  # which turns the other on
                (("bfloat16_short_moments",), IN_FP32 | MOMENTS),
                (("float16",), {"--fp16": True}),
            ],
            {"--exp-avg-dtype": "fp32", "--exp-avg-sq-dtype": "fp32"},
        ),
        Made(("loss_scale",), ("--initial-loss-scale", "--loss-scale-window"), _write_scale, _scale),
        Cases(
            ("products",),
            [
                (("plain",), {}),
                (("fp8_tensor",), {FP8: "hybrid", RECIPE: "tensorwise"}),
                (
                    ("fp8_delayed",),
                    {FP8: "hybrid", RECIPE: "delayed", HISTORY: 16, "--fp8-amax-compute-algo": "max"},
                ),
                (("fp8_e4m3",), {FP8: "e4m3", RECIPE: "tensorwise"}),
                (("fp8_tiles",), {FP8: "e4m3", RECIPE: "blockwise"}),
                (("mxfp8",), {FP8: "e4m3", RECIPE: "mxfp8"}),
                (("nvfp4",), {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}),
            ],
        ),
        Cases(("offload",), [(("none",), {}), (("optimizer",), {"--optimizer-cpu-offload": True})]),
        Made(
            ("vocab_size",),
            ("--vocab-size", PAD),
            lambda values: {"--vocab-size": values["vocab_size"], PAD: 1},
            _vocabulary,
        ),
    ],
    noted={
        "order": "its ranks are in one of two orders, dp-pp-cp-tp or pp-dp-cp-tp",
        "bucket_bytes": "its buckets are counted in parameters (--ddp-bucket-size)",
        "overlap": "--tp-comm-overlap goes with --sequence-parallel only",
        "ep_node": "its dispatcher does not cross to a node first",
        "ep_chunks": "rows travel to experts at once",
        "ep_travel": "tokens travel to experts, never experts to tokens",
        "ep_shadow": "no expert is copied for a step",
    },
    why={
        "schedule": "it has 1f1b and interleaved",
        "layout": "two pieces for each rank, as zigzag has",
        "bias": "its LayerNorm has a bias",
        "vocab_size": "its table is padded to a multiple of tp",
        "rope_theta": "--rotary-base is a whole number",
    },
    unlike="""--squared-relu --quick-geglu --apply-layernorm-1p --apply-residual-connection-post-layernorm
    --use-rope-scaling --rotary-interleaved --qk-l2-norm --window-size --mtp-num-layers --no-rope-freq
    --add-qkv-bias --fp32-residual-connection --apply-query-key-layer-scaling --use-torch-fsdp2
    --rampup-batch-size --softmax-type
    --pipeline-model-parallel-layout --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --moe-input-jitter-eps --expert-tensor-parallel-size""".split(),
)


def write(job: Job, node: int | None = None) -> Written:
    """For nodes of so many devices, or for one node of as many as there are ranks."""
    options, notes = SYSTEM.write(job)
    ranks, words = options.pop(RANKS), []
    launcher, meet = torchrun(ranks, node)
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words.append(" ".join((name, *(shlex.quote(str(one)) for one in values))))
    command = " \\\n  ".join((f"{launcher} pretrain_gpt.py", *words))
    return Written(command + "\n", notes + meet, {})


def read(text: str) -> tuple[Job, Options]:
    """Of a command line; without a launcher in front it is for as many ranks as its sizes ask for."""
    require_text(text=text)
    words, ranks, options, name = shlex.split(text.replace("\\\n", " ")), 1, {}, None
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), -1)
    before = [part for word in words[: max(script, 0)] for part in word.split("=")]
    for word, after in zip(before, before[1:]):
        if word in LAUNCHER and not after.isdigit():
            raise ValueError(f"{word} {after}: say how many, dp follows from it")
        ranks *= int(after) if word in LAUNCHER else 1
    for word in words[script + 1 :]:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = [value] if value else []
        elif name is None:
            raise ValueError(f"{word!r} in front of the first option; give options as --name value")
        else:
            options[name].append(word)
    options = {name: _of_kind(name, given) for name, given in options.items()}
    if missing := [name for name in NEEDED if name not in options]:
        raise ValueError(f"{missing[0]} is missing, and Megatron-LM has no default for it")
    return SYSTEM.read(options | ({RANKS: ranks} if script > 0 else {}))


def _of_kind(name: str, given: list[str]) -> object:
    kind = known(SYSTEM.key).kinds.get(name)
    if kind is None or kind == "list":
        check_option(SYSTEM.key, name, given)
        return given
    if len(given) != (kind != "flag"):
        takes = "no value" if kind == "flag" else f"one {kind}"
        raise ValueError(f"{name} {' '.join(given)}: it takes {takes}")
    try:
        return True if kind == "flag" else {"int": int, "float": float, "str": str}[kind](given[0])
    except ValueError:
        raise ValueError(f"{name} {given[0]}: it is {kind}") from None
