"""DeepSpeed: a plan as its JSON, and beside it what code says that builds the engine.

    written = write(job)                     written.text: the JSON; written.beside: {"pp": 2, "d_model": ..}
    job, left = read(text, written.beside)

The JSON is about batch, ZeRO, precision, offload and AutoTP. The model, its length, stages (PipelineModule),
experts (deepspeed.moe.layer.MoE) and what is computed again are arguments of calls: `BESIDE` says of which.
The number of data ranks is not said at all, it follows from the three batch sizes. Of hybrid sharding there
is nothing: MiCS was taken out. Stages 2 and 3 do not go with its pipelines. Rasley et al. 2020; options.tsv
for the version.
"""

from __future__ import annotations

import json

from minitrain.plan.emit.table import (
    Cases,
    Made,
    Options,
    Same,
    System,
    Written,
    flag,
    flat,
    joined,
    nested,
    power_of_two,
    ranks_in,
    rows_of_microbatch,
    split,
)
from minitrain.plan.emit.training_job import EXPERTS, MODEL, Job, Values
from minitrain.precision.policies import BYTES, FIRST_SCALE, POLICIES

ROWS, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
STAGE, BUCKET = "zero_optimization.stage", "zero_optimization.reduce_bucket_size"
OPTIMIZER, PARAMETERS = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
GRADIENTS = "data_types.grad_accum_dtype"
POWER, WINDOW = "fp16.initial_scale_power", "fp16.loss_scale_window"


def _write_batch(values: Values) -> Options:
    return {ROWS: values["rows"], MICRO: rows_of_microbatch(values), STEPS: values["microbatches"]}


def _batch(options: Options, values: Values) -> Values:
    rows, micro, steps = options.get(ROWS, 1), options.get(MICRO), options.get(STEPS, 1)
    micro = micro or rows // steps
    if rows % (micro * steps):
        sizes = f"{ROWS}={rows}, {MICRO}={micro}, {STEPS}={steps}"
        raise ValueError(f"{sizes}; the first is the product of the others and the data ranks")
    return {"rows": rows, "microbatches": steps, "dp": rows // (micro * steps)}


def _write_stage(values: Values) -> Options:
    """Of a pipeline gradients and parameters stay whole."""
    zero = values["zero"]
    return {STAGE: zero} if zero in (0, 1) or (zero in (2, 3) and values["pp"] == 1) else {}


def _write_sequence(values: Values) -> Options:
    known = values["core"] == "ulysses" and values["layout"] == "contiguous"
    return {"sequence_parallel_size": values["cp"]} if values["cp"] > 1 and known else {}


def _sequence(options: Options, values: Values) -> Values:
    cp = options.get("sequence_parallel_size", 1)
    return {"cp": cp} | ({"core": "ulysses", "layout": "contiguous"} if cp > 1 else {})


def _write_bucket(values: Values) -> Options:
    elements, rest = divmod(values["bucket_bytes"], BYTES[POLICIES[values["precision"]].gradients])
    return {} if rest or values["dp"] * values["cp"] == 1 else {BUCKET: elements}


def _bucket(options: Options, values: Values) -> Values:
    if values["dp"] * values["cp"] == 1:
        return {}
    size = BYTES[POLICIES[values["precision"]].gradients]
    return {"bucket_bytes": options.get(BUCKET, 500_000_000) * size}


def _write_scale(values: Values) -> Options:
    power = power_of_two(values["loss_scale"] or FIRST_SCALE)
    here = values["precision"] == "float16"
    return {POWER: power, WINDOW: values["loss_scale_window"]} if here else {}


def _scale(options: Options, values: Values) -> Values:
    if values["precision"] != "float16":
        return {}
    if options.get("fp16.loss_scale"):
        raise ValueError(
            f"fp16.loss_scale = {options['fp16.loss_scale']}: it does not change; minitrain's does, use 0"
        )
    scale = 2.0 ** options.get(POWER, 16)
    window = options.get(WINDOW, 1000)
    return {"loss_scale": 0.0 if scale == FIRST_SCALE else scale, "loss_scale_window": window}


BESIDE = dict.fromkeys((*MODEL, *EXPERTS), "the model itself")
BESIDE |= {
    "pp": "PipelineModule(num_stages=..), which runs 1F1B",
    "length": "the data loader",
    "ep": "MoE(ep_size=..), in deepspeed.moe.layer",
}
BESIDE |= {"recompute": "deepspeed.checkpointing.checkpoint around each block"}

SYSTEM = System(
    "deepspeed",
    rows=[
        ranks_in("pp-dp-cp-tp"),
        Made(("dp", "rows", "microbatches"), (ROWS, MICRO, STEPS), _write_batch, _batch),
        Made(("zero",), (STAGE,), _write_stage, lambda options, values: {"zero": options.get(STAGE, 0)}),
        Same("tp", "tensor_parallel.autotp_size", 1),
        flag("overlap", "tensor_parallel.tp_overlap_comm"),
        Made(("cp", "core", "layout"), ("sequence_parallel_size",), _write_sequence, _sequence),
        Cases(
            ("precision",),
            [
                (("float32",), {}),
                (("bfloat16",), {"bf16.enabled": True, GRADIENTS: "bf16"}),
                (("bfloat16_main_grads",), {"bf16.enabled": True, GRADIENTS: "fp32"}),
                (("bfloat16",), {"bf16.enabled": True}),  # its default is the model's own
                (("float16",), {"fp16.enabled": True}),
            ],
        ),
        Made(("loss_scale", "loss_scale_window"), (POWER, WINDOW, "fp16.loss_scale"), _write_scale, _scale),
        Made(("bucket_bytes",), (BUCKET,), _write_bucket, _bucket),
        Cases(
            ("offload",),
            [
                (("none",), {}),
                (("optimizer",), {OPTIMIZER: "cpu"}),
                (("optimizer+parameters",), {OPTIMIZER: "cpu", PARAMETERS: "cpu"}),
            ],
        ),
        flag("recompute_partition", "activation_checkpointing.partition_activations"),
    ],
    noted={
        "order": "its ranks are in the order pp-dp-cp-tp",
        "ep_node": "its dispatcher does not cross to a node first",
        "ep_chunks": "rows travel to experts at once",
        "ep_travel": "tokens travel to experts, never experts to tokens",
        "ep_shadow": "no expert is copied for a step",
        "bucket_bytes": "reduce_bucket_size counts whole gradients",
    },
    why={
        "zero": "stages 0 to 3, and with a pipeline 0 and 1",
        "schedule": "its pipeline runs 1f1b",
        "cp": "sequence_parallel_size is Ulysses, contiguous",
        "core": "sequence_parallel_size is Ulysses, contiguous",
        "layout": "sequence_parallel_size is Ulysses, contiguous",
    },
    beside=BESIDE,
    unlike=("torch_autocast.enabled", "zero_optimization.zero_quantized_weights")
    + ("zero_optimization.zero_quantized_gradients", "zero_optimization.zero_hpz_partition_size"),
)


def write(job: Job) -> Written:
    options, notes = SYSTEM.write(job)
    said, beside = split(options)
    return Written(json.dumps(nested(said), indent=2) + "\n", notes, beside)


def read(text: str, beside: Values) -> tuple[Job, Options]:
    """A JSON and what its script says: at least the model and `length`."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"DeepSpeed: no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"DeepSpeed: the JSON is {type(tree).__name__}; its configuration is an object")
    if wrong := [name for name in beside if name not in BESIDE]:
        raise ValueError(f"beside: {wrong[0]!r} is no word of code; use {', '.join(BESIDE)}")
    return SYSTEM.read(joined(flat(tree), beside))
