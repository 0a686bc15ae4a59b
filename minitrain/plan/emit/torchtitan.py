"""torchtitan: a plan as its TOML, and beside it the sizes which the TOML calls by a name (model.flavor).

    written = write(job)                     written.text: the TOML; written.beside: {"d_model": 4096, ..}
    job, left = read(text, written.beside)

A degree each for replicas and shards says what ZeRO is: shards alone, and parameters kept after forward, are
ZeRO-2, freed ones ZeRO-3; both degrees hybrid sharding; ZeRO-1 there is not. Tensor parallelism always cuts
the sequence as well. bfloat16 is what is computed in: weights, gradients and sums are float32, which is
`bfloat16_main_grads` here. Liang et al. 2024, arXiv:2410.06511; options.tsv for the version, the last one
before its configuration became Python.
"""

from __future__ import annotations

import json
import tomllib

from minitrain.plan.emit.table import (
    Cases,
    Made,
    Options,
    Same,
    System,
    Written,
    check_stages,
    flat,
    joined,
    ranks_in,
    rows_of_microbatch,
    split,
)
from minitrain.plan.emit.training_job import EXPERTS, MODEL, Job, Values
from minitrain.ranks.checks import require_text

P, T = "parallelism.", "training."
REPLICAS, SHARDS = (f"{P}data_parallel_{what}_degree" for what in ("replicate", "shard"))
RESHARD = f"{P}fsdp_reshard_after_forward"
STAGES, PER_STAGE = f"{P}pipeline_parallel_degree", f"{P}pipeline_parallel_layers_per_stage"
FIRST, LAST = (f"{P}pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
NAME, MICRO = f"{P}pipeline_parallel_schedule", f"{P}pipeline_parallel_microbatch_size"
LOCAL, GLOBAL = f"{T}local_batch_size", f"{T}global_batch_size"
CP, ROTATE = f"{P}context_parallel_degree", f"{P}context_parallel_rotate_method"
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
SCHEDULES |= {"zb_interleaved": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
TWO = ("zb_v", "dualpipe_v")  # stages per rank
CORES = {"gathered": "allgather", "ring": "alltoall"}


def _write_data(values: Values) -> Options:
    dp, zero = values["dp"], values["zero"]
    if zero in (2, 3):
        return {REPLICAS: 1, SHARDS: dp, RESHARD: "never" if zero == 2 else "always"}
    if zero == "III" and values["nodes"] == 1 < values["node"] < dp:
        return {REPLICAS: dp // values["node"], SHARDS: values["node"], RESHARD: "always"}
    return {REPLICAS: dp, SHARDS: 1}


def _data(options: Options, values: Values) -> Values:
    replicas, shards = options.get(REPLICAS, 1), options.get(SHARDS, -1)
    if shards < 1:
        raise ValueError(
            f"{SHARDS} = {shards}: the rest of the ranks, whose number the TOML does not say; give it"
        )
    keep = options.get(RESHARD, "default") == "never"
    if replicas > 1 and shards > 1 and keep:
        raise ValueError(f"{REPLICAS} = {replicas} with {RESHARD} = 'never': no zero does this; use 'always'")
    zero = 0 if shards == 1 else "III" if replicas > 1 else 2 if keep else 3
    return {"dp": replicas * shards, "zero": zero} | ({"node": shards} if zero == "III" else {})


def _write_batch(values: Values) -> Options:
    micro = rows_of_microbatch(values)
    pipelined = {MICRO: micro} if values["pp"] > 1 else {}
    local = micro * values["microbatches"] if pipelined else micro
    return {LOCAL: local, GLOBAL: values["rows"]} | pipelined


def _batch(options: Options, values: Values) -> Values:
    """Without a pipeline batches of a rank are accumulated; with one they are cut."""
    local = options.get(LOCAL, 8)
    rows = options.get(GLOBAL, -1)
    rows = local * values["dp"] if rows < 0 else rows
    steps, rest = divmod(rows, local * values["dp"])
    micro = options.get(MICRO, 1) if values["pp"] > 1 else local
    if rest or local % micro or (values["pp"] > 1 and steps != 1):
        sizes = f"{GLOBAL} = {rows}, {LOCAL} = {local}, {MICRO} = {micro} on {values['dp']} data ranks"
        raise ValueError(
            f"{sizes}: no microbatches do this; the first is a multiple, of a pipeline the product"
        )
    return {"rows": rows, "microbatches": local // micro if values["pp"] > 1 else steps}


def _write_pipeline(values: Values) -> Options:
    if (pp := values["pp"]) == 1:
        return {STAGES: 1}
    chunks = 2 if values["schedule"] in TWO else values["chunks"]
    check_stages(values, chunks, "torchtitan")
    size = values["num_layers"] // (pp * chunks)
    return {STAGES: pp, NAME: SCHEDULES.get(values["schedule"], "1F1B"), PER_STAGE: size, FIRST: 0, LAST: 0}


def _pipeline(options: Options, values: Values) -> Values:
    if (pp := options.get(STAGES, 1)) == 1:
        return {"pp": 1}
    name = options.get(NAME, "1F1B")
    schedule = next((ours for ours, theirs in SCHEDULES.items() if theirs.lower() == name.lower()), None)
    if schedule is None or options.get(FIRST, 1) or options.get(LAST, 1) or PER_STAGE not in options:
        rule = (
            f"schedules are {', '.join(SCHEDULES.values())}; give {PER_STAGE}, and 0 for {FIRST} and {LAST}"
        )
        raise ValueError(f"{NAME} = {name!r} with these stages: {rule}")
    chunks, rest = divmod(values["num_layers"], pp * options[PER_STAGE])
    if rest or (schedule in TWO and chunks != 2):
        sizes = f"{values['num_layers']} layers, {PER_STAGE} = {options[PER_STAGE]}, {STAGES} = {pp}"
        raise ValueError(f"{sizes}: not as many stages as {name} has")
    return {"pp": pp, "schedule": schedule, "chunks": 1 if schedule in TWO else chunks}


def _write_context(values: Values) -> Options:
    known = {ROTATE: CORES[values["core"]]} if values["cp"] > 1 and values["core"] in CORES else {}
    return {CP: values["cp"]} | known


def _context(options: Options, values: Values) -> Values:
    core = next(ours for ours, theirs in CORES.items() if theirs == options.get(ROTATE, "allgather"))
    return {"cp": options.get(CP, 1)} | ({"core": core} if options.get(CP, 1) > 1 else {})


def _write_tensor(values: Values) -> Options:
    tp = values["tp"]
    experts = {f"{P}expert_parallel_degree": values["ep"], f"{P}expert_tensor_parallel_degree": tp}
    same = values["sequence_parallel"] == (tp > 1)
    return {f"{P}tensor_parallel_degree": tp if same else 1} | (experts if values["ep"] > 1 else {})


def _tensor(options: Options, values: Values) -> Values:
    tp, ep = options.get(f"{P}tensor_parallel_degree", 1), options.get(f"{P}expert_parallel_degree", 1)
    inside = options.get(f"{P}expert_tensor_parallel_degree", 1)
    if ep > 1 and inside != tp:
        raise ValueError(
            f"{P}expert_tensor_parallel_degree = {inside}: each expert is cut over tp as well; use {tp}"
        )
    return {"tp": tp, "ep": ep, "sequence_parallel": tp > 1}


CONVERTERS, AC = "model.converters", "activation_checkpoint.mode"
FP8, MX = "quantize.linear.float8", "quantize.linear.mx"
BESIDE = dict.fromkeys((*MODEL, *EXPERTS), "model.flavor")

SYSTEM = System(
    "torchtitan",
    rows=[
        ranks_in("pp-dp-cp-tp"),
        Made(("dp", "zero", "node"), (REPLICAS, SHARDS, RESHARD), _write_data, _data),
        Made(
            ("tp", "ep", "sequence_parallel"),
            tuple(
                f"{P}{name}_degree"
                for name in ("tensor_parallel", "expert_parallel", "expert_tensor_parallel")
            ),
            _write_tensor,
            _tensor,
        ),
        Cases(("overlap",), [((False,), {}), ((True,), {f"{P}enable_async_tensor_parallel": True})]),
        Made(
            ("pp", "schedule", "chunks"), (STAGES, NAME, PER_STAGE, FIRST, LAST), _write_pipeline, _pipeline
        ),
        Made(("cp", "core"), (CP, ROTATE), _write_context, _context),
        Made(("rows", "microbatches"), (LOCAL, GLOBAL, MICRO), _write_batch, _batch),
        Same("length", f"{T}seq_len", 2048),
        Cases(("recompute",), [(("none",), {AC: "none"}), (("full",), {AC: "full"})], {AC: "selective"}),
        Cases(
            ("precision",),
            [
                (("bfloat16_main_grads",), {f"{T}mixed_precision_param": "bfloat16"}),
                (("float32",), {f"{T}mixed_precision_param": "float32"}),
            ],
            {f"{T}mixed_precision_param": "bfloat16"},
        ),
        Cases(
            ("products",),
            [
                (("plain",), {}),
                (("fp8_tensor",), {CONVERTERS: [FP8], f"{FP8}.recipe_name": "tensorwise"}),
                (("fp8_rows",), {CONVERTERS: [FP8], f"{FP8}.recipe_name": "rowwise"}),
                (("mxfp8",), {CONVERTERS: [MX], f"{MX}.recipe_name": "mxfp8_cublas"}),
            ],
        ),
        Cases(("offload",), [(("none",), {}), (("optimizer+parameters",), {f"{T}enable_cpu_offload": True})]),
    ],
    noted={
        "order": "its ranks are in the order pp-dp-cp-tp",
        "bucket_bytes": "its unit of communication is a block",
        "ep_node": "its dispatcher does not cross to a node first",
        "ep_chunks": "rows travel to experts at once",
        "ep_travel": "tokens travel to experts, never experts to tokens",
        "ep_shadow": "no expert is copied for a step",
        "recompute_partition": "inputs are cut over tp already",
    },
    why={
        "zero": "it has 0, 2, 3 and III",
        "tp": "its tp cuts the sequence as well",
        "sequence_parallel": "its tp always does",
        "schedule": "it has 1F1B, GPipe, two interleaved ones and two V shapes",
        "layout": "TOML has no null, so the load balancer stays headtail: zigzag",
    },
    beside=BESIDE,
    unlike=(
        f"{P}module_fqns_per_model_part",
        f"{P}pipeline_parallel_schedule_csv",
        f"{P}disable_loss_parallel",
    ),
)


def write(job: Job) -> Written:
    options, notes = SYSTEM.write(job)
    said, beside = split(options)
    sections: dict[str, list[str]] = {}
    for name, value in said.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    text = "\n\n".join("\n".join((f"[{section}]", *lines)) for section, lines in sections.items())
    return Written(text + "\n", notes, beside)


def read(text: str, beside: Values) -> tuple[Job, Options]:
    """A TOML and the sizes that its model has."""
    require_text(text=text)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"torchtitan: no TOML: {error}") from None
    if wrong := [name for name in beside if name not in BESIDE]:
        raise ValueError(f"beside: {wrong[0]!r} is no size of a model; use {', '.join(BESIDE)}")
    return SYSTEM.read(joined(flat(tree), beside))
