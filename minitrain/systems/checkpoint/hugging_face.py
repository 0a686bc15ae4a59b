"""Models of four families as Hugging Face writes them: a config.json, and weights by their names.

    config = config_of(json.load(open("config.json")))          llama, gpt2, mixtral, deepseek_v3
    settings_of(config, "Mixtral")                              the same the other way round
    model.load_state_dict(dict(incoming(state, config)))        dict(outgoing(model.state_dict(), config))

                Llama, Mixtral, DeepSeek-V3        GPT-2                              here
    linear      y = x Wᵀ, W [out, in]             Conv1D: y = x W + b, W [in, out]   as Llama
    Q, K, V     three; V3: K and V of a head one  one, c_attn [D, 3D]: Q, K, V       three
    positions   RoPE on halves (i, i + K/2);      a table, wpe                       both, the same halves
                V3: on pairs (2i, 2i + 1)
    norm        RMSNorm; rms_norm_eps             LayerNorm, 1e-5                    norm_eps (default 1e-5)
    MLP         silu(gate) * up                   gelu_new, the tanh form            "swiglu"; "gelu_tanh"
    experts     one by one, [out, in]                                                stacked, [E, in, out]
    head        lm_head, or tied and left out     tied to wte                        tied: under both names

Each of these, wrong, gives a model that runs and writes nearly sense: GELU for its tanh form moves logits by
1e-3, eps 1e-6 for 1e-5 by less. hugging_face.tsv has all names, by family.
DeepSeek-AI 2024, arXiv:2412.19437, sections 2.1.2 and 4.3; Jiang et al. 2024, arXiv:2401.04088, table 1.
"""

import csv
import json
import math
import re
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitrain.checkpoint.disk import Disk, new_file
from minitrain.checkpoint.format import DTYPES, Damaged, File, bytes_of, framed, write_file
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import Store, file_name
from minitrain.model.config import ExpertsConfig, GPTConfig, plain_values
from minitrain.model.gpt import GPT
from minitrain.ranks.pieces import whole_piece

TABLE = Path(__file__).with_name("hugging_face.tsv")
KINDS = {"llama": "Llama", "gpt2": "GPT-2", "mixtral": "Mixtral", "deepseek_v3": "DeepSeek-V3"}
WRITTEN = {"GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Mixtral": "MixtralForCausalLM"}
# Which part of theirs is ours, where theirs is one.
PARTS = {
    "GPT-2": {"attention.q": 0, "attention.k": 1, "attention.v": 2},
    "DeepSeek-V3": {"attention.k_up": 0, "attention.v_up": 1},
}
# In files of old versions: masks and angles, no parameters.
BUFFERS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
# Rows of a head that turns (i, i + K/2), and of one that turns (2i, 2i + 1).
HALVES, PAIRS = "(pair i) ...", "(i pair) ..."


@cache
def rows_of(family: str, kind: str) -> list[dict[str, str]]:
    """Of hugging_face.tsv: ours, theirs, and as JSON what is meant where a file says nothing. Of "only" few
    values have a counterpart here; "read" and "known" are read below, or change no forward."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row for row in rows if family in row["families"].split() and row["kind"] == kind]


def counterparts(family: str, kind: str) -> dict[str, str]:
    """Ours to theirs, of sizes, modules of a block, or what is outside of blocks."""
    return {row["ours"]: row["theirs"] for row in rows_of(family, kind)}


def config_of(settings: Mapping) -> GPTConfig:
    """The model of a config.json: sizes and the arithmetic of a forward, not how it was trained.

    Refused is what would change logits in silence: settings unknown here, rescaled RoPE (DeepSeek-V3's own
    file has YaRN; in pre-training there was none), sliding windows, biases in Llama, other routers. V3 takes
    groups of experts by their 2 best, we by their top_k / topk_group best: the same for its 8 and 4."""
    if (name := KINDS.get(settings.get("model_type"))) is None:
        raise ValueError(f"model_type {settings.get('model_type')!r}; known here are {', '.join(KINDS)}")
    only = {row["theirs"]: json.loads(row["missing"]) for row in rows_of(name, "only")}
    known = {row["theirs"] for kind in ("size", "read", "known") for row in rows_of(name, kind)} | only.keys()
    _known(name, {key: value for key, value in settings.items() if not key.startswith("_")}, known)
    _only(settings, only)
    optional = (row for row in rows_of(name, "size") if row["missing"])
    given = {**{row["theirs"]: json.loads(row["missing"]) for row in optional}, **settings}
    wanted = (row["theirs"] for kind in ("size", "read") for row in rows_of(name, kind))
    if lacks := [theirs for theirs in wanted if theirs not in given]:
        raise ValueError(f"a config.json of {name} without {', '.join(lacks)}")
    sizes = {ours: given[theirs] for ours, theirs in counterparts(name, "size").items()}
    if name == "GPT-2":
        activation = "gelu" if settings.get("activation_function") == "gelu" else "gelu_tanh"
        return GPTConfig(**sizes, norm="layer", positions="learned", bias=True, activation=activation)
    # Older files have theta on top.
    theta, rope = 1e6 if name == "Mixtral" else 10_000.0, settings.get("rope_parameters") or {}
    _known(f"{name}'s rope_parameters", rope, {"rope_theta", "rope_type", "type"})
    rope = {"rope_theta": settings.get("rope_theta", theta)} | rope
    _only(rope, dict.fromkeys(("rope_type", "type"), ["default"]))
    experts = None
    if name == "Mixtral":
        experts = ExpertsConfig(settings.get("num_local_experts", 8), settings.get("num_experts_per_tok", 2))
    if name == "DeepSeek-V3":
        plain, turned = settings["qk_nope_head_dim"], settings["qk_rope_head_dim"]
        _only(settings, {"v_head_dim": [plain], "head_dim": [turned], "qk_head_dim": [plain + turned]})
        sizes["query_latent"] = sizes["query_latent"] or 0
        experts = _deepseek_experts(settings)
    return GPTConfig(**sizes, rope_theta=rope["rope_theta"], experts=experts)


def settings_of(config: GPTConfig, family: str) -> dict:
    """What a config.json says of the model; `family` as `family_of` calls it."""
    if family not in WRITTEN:
        raise ValueError(f"a config.json of {family} is not written here; {', '.join(WRITTEN)} are")
    kind = next(kind for kind, name in KINDS.items() if name == family)
    settings = dict(model_type=kind, architectures=[WRITTEN[family]])
    settings |= {theirs: getattr(config, ours) for ours, theirs in counterparts(family, "size").items()}
    if family == "GPT-2":
        return settings | dict(activation_function="gelu" if config.activation == "gelu" else "gelu_new")
    settings |= dict(rope_theta=config.rope_theta, hidden_act="silu")
    if experts := config.experts:
        settings |= dict(num_local_experts=experts.num_experts, num_experts_per_tok=experts.top_k)
    return settings


def _deepseek_experts(settings: Mapping) -> ExpertsConfig:
    top_k, nodes = settings["num_experts_per_tok"], settings["n_group"] or 1
    limit = settings["topk_group"] or nodes
    if limit < nodes and top_k != 2 * limit:
        given = f"num_experts_per_tok = {top_k}, topk_group = {limit}"
        raise ValueError(f"{given}: theirs takes groups by their 2 best, so only 2 of a group agree")
    return ExpertsConfig(
        settings["n_routed_experts"],
        top_k,
        "deepseek",
        expert_width=settings["moe_intermediate_size"],
        shared_experts=settings["n_shared_experts"] or 0,
        dense_first=settings["first_k_dense_replace"],
        route_nodes=nodes if limit < nodes else 1,
        node_limit=limit if limit < nodes else 0,
        route_scale=settings["routed_scaling_factor"],
    )


def _known(family: str, settings: Mapping, known: Collection[str]) -> None:
    if more := sorted(settings.keys() - known):
        what = f"{more[0]} = {settings[more[0]]!r}, which is no setting of {family} that is known here"
        raise ValueError(f"{what}: leave it out of config.json if it changes no forward")


def _only(settings: Mapping, known: Mapping[str, list]) -> None:
    for name, values in known.items():
        if (given := settings.get(name, values[0])) not in values:
            known = ", ".join(map(repr, values))
            raise ValueError(f"{name} = {given!r}; only {known} has a counterpart here")


# ---- weights ---------------------------------------------------------------------------------------------


def incoming(state: Mapping[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors one after the other; `state` may read each of its own when it is asked for: then
    what makes one tensor is in memory at a time. ValueError for another model's state."""
    table, family = names_of(config), family_of(config)
    found = _readers(state)
    if config.tied and "lm_head.weight" not in found:
        found["lm_head.weight"] = found.get(table["layers.0.tokens"][0])
    several = {name: range(shape[0] if "{}" in theirs else 1) for name, (theirs, _, shape) in table.items()}
    wanted = {theirs.format(e) for name, (theirs, _, _) in table.items() for e in several[name]}
    if wanted != found.keys():
        lacks, more = sorted(wanted - found.keys())[:3], sorted(found.keys() - wanted)[:3]
        raise ValueError(f"the state lacks {lacks} and has {more} too many: another model, or no {family}")
    for name, (theirs, part, shape) in table.items():
        each = [found[theirs.format(e)]() for e in several[name]]
        value = torch.stack([x.T for x in each]) if "{}" in theirs else _ours(each[0], name, part, config)
        if value.shape != shape:
            raise ValueError(f"{theirs} gives {name} {list(value.shape)}; the config wants {list(shape)}")
        yield name, value


def outgoing(state: Mapping[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    table, outer = names_of(config), "transformer." if family_of(config) == "GPT-2" else "model."
    sources: dict[str, list[str]] = {}
    for name, (theirs, _, _) in table.items():
        sources.setdefault(theirs, []).append(name)
    for theirs, names in sources.items():
        whole = theirs if theirs == "lm_head.weight" else outer + theirs
        if "{}" in theirs:
            yield from ((whole.format(e), x.T.contiguous()) for e, x in enumerate(state[names[0]]))
        else:
            yield whole, _theirs([state[name] for name in names], names[0], config)


def names_of(config: GPTConfig) -> dict[str, tuple[str, int | None, torch.Size]]:
    """{our name: (their name without its first word, {} for the number of an expert; which part of it, if it
    is several of ours; our shape)}."""
    family, last, table = family_of(config), config.num_layers + 1, {}
    inside, folder = counterparts(family, "module"), "h" if family == "GPT-2" else "layers"
    outer = {ours.format(last=last): theirs for ours, theirs in counterparts(family, "outer").items()}
    for name, value in GPT(config, device="meta").state_dict().items():
        module, _, kind = name.rpartition(".")
        number, _, inner = module.removeprefix("layers.").partition(".")
        if name in outer or module in outer:
            theirs = outer.get(name) or f"{outer[module]}.{kind}"
        else:
            theirs = inside.get(f"{inner}.{kind}") or f"{inside[inner]}.{kind}"
            if inner == "attention.q_up" and not config.query_latent:
                theirs = "self_attn.q_proj.weight"
            theirs = f"{folder}.{int(number) - 1}.{theirs}"
        table[name] = theirs, PARTS.get(family, {}).get(inner), value.shape
    return table


def _ours(value: Tensor, name: str, part: int | None, config: GPTConfig) -> Tensor:
    if name.endswith(("k_up.weight", "v_up.weight")):  # rows of a head: K, then V
        return value.unflatten(0, (config.num_heads, 2, -1))[:, part].flatten(0, 1)
    if width := _turned(name, config):
        return _last_rows(value, width, config.rope_head_dim, PAIRS, HALVES)
    value = value if part is None else value.chunk(3, dim=-1)[part]
    return value.T.contiguous() if _is_conv1d(config, name) else value


def _theirs(values: list[Tensor], name: str, config: GPTConfig) -> Tensor:
    """Theirs from one or more of ours, of which `name` is the first."""
    if name.endswith("k_up.weight"):
        return torch.stack([x.unflatten(0, (config.num_heads, -1)) for x in values], 1).flatten(0, 2)
    if width := _turned(name, config):
        return _last_rows(values[0], width, config.rope_head_dim, HALVES, PAIRS)
    values = [x.T if _is_conv1d(config, name) else x for x in values]
    return values[0].contiguous() if len(values) == 1 else torch.cat(values, dim=-1)


def _turned(name: str, config: GPTConfig) -> int:
    """Of how many rows the last `rope_head_dim` are turned in pairs in DeepSeek's files; 0: of none."""
    inside = {"q_up": config.head_dim, "kv_down": config.kv_latent}.get(name.split(".")[-2], 0)
    return inside and inside + config.rope_head_dim


def _last_rows(weight: Tensor, width: int, turned: int, order: str, other: str) -> Tensor:
    plain, last = weight.unflatten(0, (-1, width)).split((width - turned, turned), dim=1)
    last = rearrange(last, f"n {order} -> n {other}", pair=2)
    return torch.cat((plain, last), dim=1).flatten(0, 1)


def _readers(state: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """{their name, as on the hub and without its first word: what reads the tensor}."""
    bare = {re.sub(r"^(model|transformer)\.", "", name): name for name in state if not BUFFERS.search(name)}
    # Multi-token prediction modules, numbered after the last layer: nothing here has them.
    beside = tuple(name.removesuffix("eh_proj.weight") for name in bare if name.endswith(".eh_proj.weight"))
    own = {key: name for key, name in bare.items() if not key.startswith(beside)}
    return {key: partial(state.__getitem__, name) for key, name in own.items()}


def family_of(config: GPTConfig) -> str:
    c, experts = config, config.experts
    later = range(experts.dense_first + 1, c.num_layers + 1) if experts else ()
    alike = all(c.experts_in(block) == experts.num_experts for block in later)
    router = experts and experts.router if alike else "of unlike blocks"
    mixtral = router == "top_k" and not (experts.shared_experts or experts.dense_first)
    kind = c.norm, c.positions, c.activation, c.bias, c.residual, c.embedding_norm, c.rope_fraction
    match kind, router, bool(c.kv_latent):
        case ("layer", "learned", "gelu" | "gelu_tanh", True, "pre", False, 1), None, False:
            return "GPT-2"
        case ("rms", "rope", "swiglu", False, "pre", False, 1), None, False:
            return "Llama"
        case ("rms", "rope", "swiglu", False, "pre", False, 1), "top_k", False if mixtral:
            if c.expert_width == c.d_ff:
                return "Mixtral"
        case ("rms", "rope", "swiglu", False, "pre", False, 1), "deepseek", True:
            return "DeepSeek-V3"
    said = f"norm, positions, activation, bias, residual {kind[:5]}, kv_latent {c.kv_latent}, {experts}"
    raise ValueError(f"a model with {said} is none of {', '.join(KINDS.values())}")


def _is_conv1d(config: GPTConfig, name: str) -> bool:
    return config.positions == "learned" and bool(re.search(r"\.(attention|mlp)\..*weight$", name))


# ---- files: plain safetensors, tensor by tensor, so that memory holds one --------------------------------


class Tensors(UserDict):
    """Of a folder as on the hub, model.safetensors or several and an index; each is read when asked for."""

    def __init__(self, path: Path):
        index, names = path / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        super().__init__()  # {name: the file that has it}
        for file in [path] if path.is_file() else [path / name for name in sorted(names)]:
            try:
                opened = safe_open(file, "pt")
            except FileNotFoundError:
                raise ValueError(f"{file} does not exist: give a folder with model.safetensors") from None
            except SafetensorError as error:
                raise Damaged(f"{file} is no file of safetensors, or is damaged: {error}") from None
            self.data |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name].get_tensor(name)


def write_tensors(path: Path, shapes: Mapping[str, tuple], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """`shapes`: {name: (dtype, shape)}, of all that `tensors` will be. Returns the bytes of the file."""
    header, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=DTYPES[dtype], shape=list(shape), data_offsets=[offset, offset + size])
        offset += size
    text, disk = framed({"format": "pt"}, header), Disk()
    with new_file(disk, path) as file:
        disk.write(file, 0, text)
        for name, value in tensors:
            disk.write(file, len(text) + header[name]["data_offsets"][0], bytes_of(value))
    return len(text) + offset


# ---- checkpoints of ours ---------------------------------------------------------------------------------


class Weights:
    """The parameters of a checkpoint, whole, each read when asked for; a tied head under its own name."""

    def __init__(self, saved: Saved, config: GPTConfig):
        self.saved, start = saved, "parameters/"
        self.entries = {n.removeprefix(start): e[0] for n, e in saved.entries.items() if n.startswith(start)}
        if config.tied:
            self.entries[f"layers.{config.num_layers + 1}.out.weight"] = self.entries["layers.0.tokens"]

    def empty(self, name: str, device: str) -> Tensor:
        return torch.empty(self.entries[name].whole, dtype=self.entries[name].dtype, device=device)

    def shapes(self) -> dict[str, Tensor]:
        return {name: self.empty(name, "meta") for name in self.entries}

    def __getitem__(self, name: str) -> Tensor:
        piece = whole_piece(self.entries[name].name, self.empty(name, "cpu"))
        self.saved.fill(piece)
        self.saved.finish()  # what is damaged is said here
        return piece.values


def export_weights(files: Sequence[File], config: GPTConfig, folder: Path) -> int:
    """config.json and model.safetensors of a checkpoint in `files`; returns the bytes of the latter."""
    weights = Weights(Saved(files), config)
    shapes = {name: (x.dtype, tuple(x.shape)) for name, x in outgoing(weights.shapes(), config)}
    (dtype, _), *_ = shapes.values()
    settings = settings_of(config, family_of(config)) | {"dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return write_tensors(folder / "model.safetensors", shapes, outgoing(weights, config))


def import_weights(folder: Path, target: Path) -> int:
    """A checkpoint of step 0 with parameters alone; returns the bytes of its file."""
    config = config_of(json.loads((folder / "config.json").read_text()))
    head = f"layers.{config.num_layers + 1}.out.weight"  # if it is tied, the table of tokens
    theirs = ((n, x) for n, x in incoming(Tensors(folder), config) if not (config.tied and n == head))
    pieces, store = (whole_piece(f"parameters/{name}", x) for name, x in theirs), Store(target)
    written = write_file(store.disk, store.begin(0) / file_name(0), pieces, {"numbers": {}})
    plain = dict(identity=plain_values(config), strategy={}, position={"step": 0}, records=[])
    store.commit(0, [written], plain)
    store.unlock()
    return written.size
