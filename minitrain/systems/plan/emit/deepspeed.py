"""DeepSpeed: a plan as its JSON, and what code says that builds the engine.

    written = write(job)                     written.text: the JSON; written.in_code: {"pp": 2, "d_model": ..}
    job, rest = read(text, written.in_code)

The JSON is about batch, ZeRO, precision, offload and AutoTP. The rest are arguments of calls: `IN_CODE` says
of which. The number of data ranks follows from the three batch sizes. Of hybrid sharding there is nothing:
MiCS was taken out. Stages 2 and 3 do not go with its pipelines. Rasley et al. 2020; version: deepspeed.tsv.
"""

import json
import math

from minitrain.precision.policies import BYTES, FIRST_SCALE, POLICIES
from minitrain.systems.plan.emit.table import Options, System, Written, equal_parts, flat, nested
from minitrain.systems.plan.emit.training_job import EXPERTS, MODEL, Job, Values, parsed

IN_CODE = {
    **dict.fromkeys((*MODEL, *EXPERTS), "the model itself"),
    "pp": "PipelineModule(num_stages=..), which runs 1F1B",
    "length": "the data loader",
    "ep": "MoE(ep_size=..), in deepspeed.moe.layer",
    "recompute": "deepspeed.checkpointing.checkpoint around each block",
}


def derive(values: Values) -> Values:
    pipelined, ulysses = values["pp"] > 1, (values["core"], values["layout"]) == ("ulysses", "contiguous")
    numbers = {
        "microbatch": equal_parts(values, "rows", values["dp"], values["microbatches"]),
        "zero": 0 if pipelined and values["zero"] in (2, 3) else values["zero"],
        "sequence_ranks": values["cp"] if ulysses and values["cp"] > 1 else None,
    }
    if values["dp"] * values["cp"] > 1:
        elements, rest = divmod(values["bucket_bytes"], gradient_bytes(values))
        numbers["bucket_elements"] = None if rest else elements
    if values["precision"] == "float16":
        exponent = math.log2(values["loss_scale"] or FIRST_SCALE)
        numbers |= {"scale_power": int(exponent), "scale_window": values["loss_scale_window"]}
    return numbers


def solve(values: Values) -> Values:
    rows, steps, cp = values["rows"], values["microbatches"], values["sequence_ranks"]
    microbatch = values["microbatch"] or rows // steps
    dp, rest = divmod(rows, microbatch * steps)
    if rest:
        parts = f"train_micro_batch_size_per_gpu={microbatch}, gradient_accumulation_steps={steps}"
        raise ValueError(f"train_batch_size={rows}, {parts}; the first is a multiple of the others")
    found = {"dp": dp, "cp": cp, "order": "pp-dp-cp-tp"}
    if cp > 1:
        found |= {"core": "ulysses", "layout": "contiguous"}
    if dp * cp > 1:
        found["bucket_bytes"] = values["bucket_elements"] * gradient_bytes(values)
    if values["precision"] == "float16":
        if fixed := values["fixed_scale"]:
            raise ValueError(f"fp16.loss_scale = {fixed}: it does not change; minitrain's does, use 0")
        scale = 2.0 ** values["scale_power"]
        found |= {"loss_scale": 0.0 if scale == FIRST_SCALE else scale}
        found |= {"loss_scale_window": values["scale_window"]}
    return found


def gradient_bytes(values: Values) -> int:
    return BYTES[POLICIES[values["precision"]].gradients]


SYSTEM = System("deepspeed", derive, solve, IN_CODE)


def write(job: Job) -> Written:
    options, in_code, notes = SYSTEM.write(job)
    return Written(json.dumps(nested(options), indent=2) + "\n", notes, in_code)


def read(text: str, in_code: Values) -> tuple[Job, Options]:
    return SYSTEM.read(flat(parsed(text, json.loads, "DeepSpeed: no JSON")), in_code)
