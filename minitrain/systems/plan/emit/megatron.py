"""Megatron-LM: a plan as the arguments of pretrain_gpt.py, and such a command as a plan.

    written = write(job, node=8)    torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --bf16 ..
    job, rest = read(text)          rest: options that say nothing of a plan (--lr, --save, ..)

Data parallelism is what is left of the ranks, so the launcher's number of ranks is part of the plan. Of
schedules there are 1F1B and interleaved 1F1B, of layouts of a sequence the zigzag, of ZeRO its distributed
optimizer and Megatron-FSDP. A command that names none of them is read as its defaults: 0.1 of dropout,
LayerNorm, learned positions, GELU and a tied head. Experts are in the blocks that --moe-layer-freq lists; the
weights of their losses carry over as numbers, how they are averaged was not compared. No torch.
"""

import ast
import shlex
from argparse import SUPPRESS, ArgumentParser
from dataclasses import replace

from minitrain.model.config import divisors
from minitrain.plan.predict.training_run import Stack
from minitrain.precision.policies import FIRST_SCALE
from minitrain.ranks.checks import require_positive_ints, require_text
from minitrain.systems.plan.emit.table import Options, System, Written, equal_parts
from minitrain.systems.plan.emit.training_job import DEFAULTS, EXPERTS, Job, Values

RANKS = "WORLD_SIZE"  # from the environment, by the launcher
LAUNCHER = {"--nproc-per-node", "--nnodes", "--nproc_per_node"}  # of torchrun, whose product it is
TYPES = {"int": int, "float": float, "str": str}
OPTIONAL = ("route_nodes", "node_limit", "route_scale", "z_alpha", "capacity_factor")  # said if not default


def derive(values: Values) -> Values:
    dp, pp, cp, tp = (values[name] for name in ("dp", "pp", "cp", "tp"))
    chunks = values["chunks"] if values["schedule"] == "interleaved" else 1
    equal_parts(values, "num_layers", pp, chunks)
    kind, _, number = values["recompute"].partition(":")
    numbers = {
        "ranks": dp * pp * cp * tp,
        "microbatch": equal_parts(values, "rows", dp, values["microbatches"]),
        "virtual_stages": chunks if values["schedule"] == "interleaved" else None,
        "core": values["core"] if cp > 1 else None,
        "levels": [values["ulysses"], cp // values["ulysses"]] if values["core"] == "usp" else None,
        "overlap": values["overlap"] and values["sequence_parallel"],
        "granularity": {"every": "full"}.get(kind, kind) if kind in ("selective", "full", "every") else None,
        "bias": values["bias"] or values["norm"] == "layer",
        "rope_theta": int(values["rope_theta"]),
        "vocab_multiple": 1,
    }
    if values["zero"] == "III":
        numbers["copies"] = dp // values["node"] if values["nodes"] == 1 else None
    if kind in ("full", "every"):
        numbers |= {"method": "uniform", "recompute_layers": int(number or 1)}
    if values["precision"] == "float16":
        numbers["first_scale"] = values["loss_scale"] or FIRST_SCALE
        numbers["scale_window"] = values["loss_scale_window"]
    return numbers | _attention(values) | _experts(values)


def _attention(values: Values) -> Values:
    heads, width = values["num_kv_heads"], values["head_dim"]
    if not values["kv_latent"]:
        grouped = heads != values["num_heads"]
        return {"kv_channels": width, "grouped": grouped, "query_groups": heads if grouped else None}
    widths = dict(key_dim=width, value_dim=width, rope_dim=values["rope_head_dim"])
    ranks = dict(q_rank=values["query_latent"] or None, kv_rank=values["kv_latent"])
    return widths | ranks | dict(latent=True, latent_norms=True, rope_type="rope")


def _experts(values: Values) -> Values:
    if not values["num_experts"]:
        return dict.fromkeys(EXPERTS)
    every, layers, alpha = values["expert_every"], values["num_layers"], values["balance_alpha"]
    blocks = range(values["dense_first"] + every, layers + 1, every)
    said = {name: values[name] if values[name] != DEFAULTS[name] else None for name in OPTIONAL}
    return said | {
        "dispatcher": "alltoall",
        "expert_blocks": str([int(block in blocks) for block in range(1, layers + 1)]),
        "shared_width": values["shared_experts"] * values["expert_width"] or None,
        "bias_speed": values["bias_speed"] if values["router"] == "deepseek" else None,
        "balance": ["seq_aux_loss" if alpha else "none"],
        "balance_alphas": [alpha] if alpha else None,
    }


def solve(values: Values) -> Values:
    if values["norm"] == "layer" and not values["bias"]:
        raise ValueError("--disable-bias-linear with LayerNorm: its LayerNorm has a bias; use RMSNorm")
    if values["overlap"] and not values["sequence_parallel"]:
        raise ValueError("--tp-comm-overlap without --sequence-parallel: give both or neither")
    unit = values["vocab_multiple"] * values["tp"]
    found = {
        "vocab_size": -(-values["vocab_size"] // unit) * unit,  # padded for all ranks of tp
        "d_ff": values["d_ff"] or 4 * values["d_model"],
        "rope_theta": float(values["rope_theta"]),
    }
    if values["cp"] == 1:
        found["core"] = DEFAULTS["core"]
    elif values["core"] == "usp":
        found["ulysses"] = int((values["levels"] or [1])[0])
    if values["precision"] == "float16":
        scale = values["first_scale"]
        found["loss_scale"] = 0.0 if scale == FIRST_SCALE else scale
        found["loss_scale_window"] = int(values["scale_window"])
    for part in (_solve_ranks, _solve_recompute, _solve_attention, _solve_experts):
        found |= part(values | found)
    return found


def _solve_ranks(values: Values) -> Values:
    others = values["tp"] * values["pp"] * values["cp"]
    dp, rest = divmod(values["ranks"] or others, others)
    if rest:
        said = f"{values['ranks']} ranks are no multiple of tp · pp · cp = {others}"
        raise ValueError(f"{said}; start as many or other sizes")
    at_once, copies = values["microbatch"] * dp, values["copies"]
    rows = values["rows"] or at_once
    if rows % at_once:
        sizes = f"--global-batch-size {rows} and --micro-batch-size {values['microbatch']}"
        raise ValueError(f"{sizes} on dp={dp} ranks; the first is a multiple of the other two")
    found = {"dp": dp, "rows": rows, "microbatches": rows // at_once}
    if copies > 1 and values["zero"] != 3:
        option = f"--num-distributed-optimizer-instances {copies}"
        raise ValueError(f"{option} without Megatron-FSDP's optim_grads_params: no zero does this")
    if copies > 1:
        found |= {"zero": "III", "node": dp // copies}
    chunks = values["virtual_stages"]
    if values["layers_per_stage"]:
        chunks = values["num_layers"] // (values["pp"] * values["layers_per_stage"])
    return found | ({"schedule": "interleaved", "chunks": chunks} if chunks else {})


def _solve_recompute(values: Values) -> Values:
    kind, number = values["granularity"], values["recompute_layers"]
    if kind == "selective" or values["recompute_activations"]:
        if values["modules"] != ["core_attn"]:
            modules = " ".join(values["modules"])
            raise ValueError(f"--recompute-modules {modules}: of these only core_attn has a word here")
        return {"recompute": "selective"}
    if kind == "full" and values["method"] != "uniform":
        rule = "use uniform; a number of blocks of each stage has no word here"
        raise ValueError(f"--recompute-method {values['method']}: {rule}")
    return {"recompute": "full" if number == 1 else f"every:{number}"} if kind == "full" else {}


def _solve_attention(values: Values) -> Values:
    heads = values["num_heads"]
    if not values["latent"]:
        width = values["kv_channels"] or values["d_model"] // heads
        return {"num_kv_heads": values["query_groups"] if values["grouped"] else heads, "head_dim": width}
    same = values["key_dim"] == values["value_dim"] and values["rope_type"] == "rope"
    if not (same and values["latent_norms"]):
        rule = "keys and values of one width, --rope-type rope and --qk-layernorm"
        raise ValueError(f"--multi-latent-attention: minitrain's has {rule}")
    found = {"kv_latent": values["kv_rank"], "query_latent": values["q_rank"], "num_kv_heads": heads}
    return found | {"rope_head_dim": values["rope_dim"], "head_dim": values["value_dim"]}


def _solve_experts(values: Values) -> Values:
    if not values["num_experts"]:
        return {name: DEFAULTS[name] for name in EXPERTS}
    width, kind = values["expert_width"] or values["d_ff"], values["balance"]
    shared, rest = divmod(values["shared_width"], width)
    if rest:
        option = f"--moe-shared-expert-intermediate-size {values['shared_width']}"
        raise ValueError(f"{option} is no multiple of an expert's {width}")
    alpha = float(values["balance_alphas"][0])
    if alpha and kind != ["seq_aux_loss"]:
        option = f"--moe-router-load-balancing-type {' '.join(kind)}"
        raise ValueError(f"{option}: minitrain's loss is of each row; use seq_aux_loss")
    speed = values["bias_speed"] if values["router"] == "deepseek" else 0.0
    found = {"expert_width": width, "shared_experts": shared, "balance_alpha": alpha, "bias_speed": speed}
    return found | _blocks(str(values["expert_blocks"]), values["num_layers"])


def _blocks(text: str, layers: int) -> Values:
    """Which blocks have experts, from a list of 0 and 1, or 1 for all."""
    listed = [1] * layers if text == "1" else ast.literal_eval(text) if text.startswith("[") else []
    blocks = [number for number, has in enumerate(listed, start=1) if has]
    every = blocks[1] - blocks[0] if len(blocks) > 1 else 1
    if not blocks or blocks != list(range(blocks[0], layers + 1, every)) or blocks[0] < every:
        rule = "use a list of 0 and 1 in which, from one block on, every n-th has experts"
        raise ValueError(f"--moe-layer-freq {text} of {layers} blocks; {rule}")
    return {"expert_every": every, "dense_first": blocks[0] - every}


SYSTEM = System("megatron", derive, solve)


NOT_IN_A_PLAN = "add what a plan does not know: --train-iters, --lr, data, tokenizer, --save"


def write(job: Job, node: int | None = None, stack: Stack | None = None) -> Written:
    """For nodes of at most so many devices, or for one node of as many as there are ranks. `stack`: also the
    flags of what it overlaps, with its order of ranks."""
    if stack:
        order = "pp-dp-cp-tp" if stack.dp_inside_pp else "dp-pp-cp-tp"
        overlap = stack.tp_overlapped and job.strategy.sequence_parallel
        job = replace(job, strategy=replace(job.strategy, order=order, overlap=overlap))
    options, in_code, notes = SYSTEM.write(job)
    ranks, notes = options.pop(RANKS), [*notes, *[NOT_IN_A_PLAN] * bool(stack)]
    if stack and stack.dp_overlapped and job.strategy.dp > 1:
        options["--overlap-grad-reduce"] = True
        options |= {"--overlap-param-gather": True} if job.strategy.zero else {}
    if stack and not stack.p2p_overlapped and job.strategy.chunks > 1:
        options["--no-overlap-p2p-communication"] = True
    node = ranks if node is None else node
    require_positive_ints(node=node)
    each = max(n for n in divisors(ranks) if n <= node)
    nodes = f"--nnodes {ranks // each} " if ranks > each else ""
    if nodes:
        start = f"start it on each of {ranks // each} nodes"
        notes = [*notes, f"{start}, with torchrun's options by which they meet"]
    lines = [f"torchrun {nodes}--nproc-per-node {each} pretrain_gpt.py"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        lines.append(" ".join((name, *(shlex.quote(str(one)) for one in values))))
    return Written(" \\\n  ".join(lines) + "\n", notes, in_code)


def read(text: str) -> tuple[Job, Options]:
    """Of a command line; without a launcher in front it is for as many ranks as its sizes ask for."""
    require_text(text=text)
    words, ranks = shlex.split(text.replace("\\\n", " ")), 1
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), -1)
    before = [part for word in words[: max(script, 0)] for part in word.split("=")]
    for word, after in zip(before, before[1:]):
        if word in LAUNCHER and not after.isdigit():
            raise ValueError(f"{word} {after}: say how many, dp follows from it")
        ranks *= int(after) if word in LAUNCHER else 1
    given, unknown = _Parser().parse_known_args(words[script + 1 :])
    if unknown:
        SYSTEM.check(unknown[0], True)
    return SYSTEM.read(vars(given) | ({RANKS: ranks} if script > 0 else {}), {})


class _Parser(ArgumentParser):
    def __init__(self) -> None:
        super().__init__(allow_abbrev=False, argument_default=SUPPRESS, add_help=False)
        for name, option in SYSTEM.options.items():
            if option.kind == "flag":
                self.add_argument(name, dest=name, action="store_true")
            elif name != RANKS:
                how = {"nargs": "*"} if option.kind == "list" else {"type": TYPES[option.kind]}
                self.add_argument(name, dest=name, **how)

    def error(self, message: str) -> None:
        raise ValueError(f"Megatron-LM: {message}")
