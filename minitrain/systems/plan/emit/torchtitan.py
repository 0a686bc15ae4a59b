"""torchtitan: a plan as its TOML, and the sizes which the TOML calls by a name (model.flavor).

    written = write(job)                     written.text: the TOML; written.in_code: {"d_model": 4096, ..}
    job, rest = read(text, written.in_code)

A degree each for replicas and shards says what ZeRO is: shards alone, and parameters kept after forward, are
ZeRO-2, freed ones ZeRO-3; both degrees hybrid sharding; ZeRO-1 there is not. Tensor parallelism always cuts
the sequence as well. bfloat16 is what is computed in: weights, gradients and sums are float32, which is
`bfloat16_main_grads` here. Liang et al. 2024, arXiv:2410.06511; torchtitan.tsv has the last TOML's version.
"""

import json
import tomllib

from minitrain.systems.plan.emit.table import Options, System, Written, equal_parts, flat
from minitrain.systems.plan.emit.training_job import DEFAULTS, EXPERTS, MODEL, Job, Values, parsed

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb_v": "ZBVZeroBubble"}
SCHEDULES |= {"zb_interleaved": "InterleavedZeroBubble", "dualpipe_v": "DualPipeV"}
TWO_STAGES = ("zb_v", "dualpipe_v")  # per rank
IN_CODE = dict.fromkeys((*MODEL, *EXPERTS), "model.flavor")


def derive(values: Values) -> Values:
    dp, pp, tp, zero, node = (values[name] for name in ("dp", "pp", "tp", "zero", "node"))
    microbatch = equal_parts(values, "rows", dp, values["microbatches"])
    numbers = dict(replicas=dp, shards=1, microbatch=None, local_rows=microbatch, global_rows=values["rows"])
    numbers["tensor_degree"] = tp if values["sequence_parallel"] == (tp > 1) else 1
    numbers["core"] = values["core"] if values["cp"] > 1 and values["core"] in ("gathered", "ring") else None
    if zero in (2, 3):
        numbers |= {"replicas": 1, "shards": dp, "reshard": "never" if zero == 2 else "always"}
    elif zero == "III" and values["nodes"] == 1 < node < dp:
        numbers |= {"replicas": dp // node, "shards": node, "reshard": "always"}
    if values["ep"] > 1:
        numbers |= {"expert_degree": values["ep"], "expert_tensor_degree": tp}
    if pp > 1:
        schedule = values["schedule"]
        chunks = 2 if schedule in TWO_STAGES else values["chunks"]
        stages = equal_parts(values, "num_layers", pp, chunks)
        numbers |= dict(layers_per_stage=stages, first_less=0, last_less=0)
        numbers |= dict(microbatch=microbatch, local_rows=microbatch * values["microbatches"])
        numbers["schedule_name"] = SCHEDULES.get(schedule, "1F1B")
    return numbers


def solve(values: Values) -> Values:
    found = {"order": "pp-dp-cp-tp", "tp": values["tensor_degree"], "ep": values["expert_degree"]}
    found["sequence_parallel"] = found["tp"] > 1
    if found["ep"] > 1 and (inside := values["expert_tensor_degree"]) != found["tp"]:
        option, cure = "parallelism.expert_tensor_parallel_degree", "each expert is cut over tp as well"
        raise ValueError(f"{option} = {inside}: {cure}; use {found['tp']}")
    if values["cp"] == 1:
        found["core"] = DEFAULTS["core"]
    return found | _sharding(values) | _pipeline(values) | _batch(values)


def _sharding(values: Values) -> Values:
    replicas, shards, keeps = values["replicas"], values["shards"], values["reshard"] == "never"
    if shards < 1:
        said = f"parallelism.data_parallel_shard_degree = {shards}: the rest of the ranks"
        raise ValueError(f"{said}, whose number the TOML does not say; give it")
    if shards == 1:
        return {"dp": replicas, "zero": 0}
    if replicas == 1:
        return {"dp": shards, "zero": 2 if keeps else 3}
    if keeps:
        said = "parallelism.fsdp_reshard_after_forward = 'never' with replicas and shards"
        raise ValueError(f"{said}: no zero does this; use 'always'")
    return {"dp": replicas * shards, "zero": "III", "node": shards}


def _pipeline(values: Values) -> Values:
    if (pp := values["pp"]) == 1:
        return {}
    name, layers = values["schedule_name"], values["layers_per_stage"]
    schedule = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}.get(name.lower())
    if schedule is None or values["first_less"] or values["last_less"] or not layers:
        rule = "give pipeline_parallel_layers_per_stage, and 0 layers less for the first and the last stage"
        raise ValueError(f"{name!r} with these stages: schedules are {', '.join(SCHEDULES.values())}; {rule}")
    chunks, rest = divmod(values["num_layers"], pp * layers)
    if rest or (schedule in TWO_STAGES and chunks != 2):
        sizes = f"{values['num_layers']} layers, {layers} per stage on {pp} ranks"
        raise ValueError(f"{sizes}: not as many stages as {name} has")
    return {"schedule": schedule, "chunks": 1 if schedule in TWO_STAGES else chunks}


def _batch(values: Values) -> Values:
    """Without a pipeline batches of a rank are accumulated; with one they are cut."""
    local, dp, pipelined = values["local_rows"], _sharding(values)["dp"], values["pp"] > 1
    rows = values["global_rows"] if values["global_rows"] > 0 else local * dp
    steps, rest = divmod(rows, local * dp)
    microbatch = values["microbatch"] if pipelined else local
    if rest or local % microbatch or (pipelined and steps != 1):
        sizes = f"global batch {rows}, local batch {local}, microbatch {microbatch} on {dp} data ranks"
        raise ValueError(f"{sizes}: the first is a multiple of the others, and their product with a pipeline")
    return {"rows": rows, "microbatches": local // microbatch if pipelined else steps}


SYSTEM = System("torchtitan", derive, solve, IN_CODE)


def write(job: Job) -> Written:
    options, in_code, notes = SYSTEM.write(job)
    sections: dict[str, list[str]] = {}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    text = "\n\n".join("\n".join((f"[{section}]", *lines)) for section, lines in sections.items())
    return Written(text + "\n", notes, in_code)


def read(text: str, in_code: Values) -> tuple[Job, Options]:
    return SYSTEM.read(flat(parsed(text, tomllib.loads, "torchtitan: no TOML")), in_code)
