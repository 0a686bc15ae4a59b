"""Plans as configuration of Megatron-LM, DeepSpeed and torchtitan, and back: what comes back is the plan, what cannot be
said is refused or noted, and every option that is written is one that the system has."""

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.plan.strategy import Strategy
from minitrain.precision.policies import FIRST_SCALE, PRODUCTS
from minitrain.systems.plan.emit import deepspeed, megatron, torchtitan, training_job
from minitrain.systems.plan.emit.training_job import DEFAULTS, Job

SYSTEMS = {"megatron": megatron, "deepspeed": deepspeed, "torchtitan": torchtitan}
LLAMA = presets["llama3-8b"]


def read(system, written):
    return system.read(written.text) if system is megatron else system.read(written.text, written.in_code)


# ---- any plan

CHOICES = {
    "order": ["dp-pp-cp-tp", "pp-dp-cp-tp", "dp-cp-pp-tp"],
    "dp": [1, 2, 4], "pp": [1, 1, 2], "cp": [1, 1, 1, 2, 4], "tp": [1, 2], "ep": [1, 1, 1, 2],
    "ep_chunks": [1, 1, 1, 1, 2], "zero": [0, 1, 2, 3, "III"], "node": [1, 1, 2],
    "sequence_parallel": [False, True],
    "overlap": [False, False, True],
    "schedule": ["1f1b", "1f1b", "interleaved", "gpipe", "zb_v", "zb_interleaved", "dualpipe_v"],
    "microbatches": [1, 2, 4],
    "chunks": [1, 1, 2],
    "recompute": ["none", "full", "selective", "every:2"],
    "recompute_partition": [False, False, True],
    "core": ["ring", "gathered", "ulysses", "usp"],
    "layout": ["zigzag", "zigzag", "contiguous"],
    "ulysses": [1, 1, 2],
    "precision": ["float32", "bfloat16", "bfloat16_main_grads", "float16", "bfloat16_short_moments"],
    "products": ["plain", "plain", *PRODUCTS],
    "loss_scale": [0.0, 0.0, 0.0, 65536.0, 1024.0],
    "loss_scale_window": [2000, 500],
    "bucket_bytes": [25_000_000, 40_000_000],
    "offload": ["none", "none", "optimizer", "parameters+optimizer"],
}  # fmt: skip
BASE = dict(d_model=64, num_layers=8, num_heads=8, max_positions=64)
MODELS = {
    "plain": GPTConfig(**BASE),
    "GPT-2": GPTConfig(
        **BASE, norm="layer", bias=True, positions="learned", activation="gelu", tied=True, dropout=0.1
    ),
    "GQA": GPTConfig(**BASE, num_kv_heads=2, d_ff=96, rope_fraction=0.5, rope_theta=5e5, head_dim=16),
    "RMS with biases": GPTConfig(**BASE, bias=True, activation="gelu_tanh", positions="none"),
    "latent": GPTConfig(**BASE, kv_latent=16, query_latent=24, rope_head_dim=4),
    "Mixtral": GPTConfig(**BASE, experts=ExpertsConfig(8, 2, balance_alpha=0.01, z_alpha=1e-3)),
    "Switch": GPTConfig(**BASE, experts=ExpertsConfig(8, 1, "switch", expert_every=2, capacity_factor=1.5)),
    "DeepSeek": GPTConfig(
        **BASE,
        experts=ExpertsConfig(
            8, 4, "deepseek", expert_width=32, shared_experts=2, dense_first=3, bias_speed=1e-3,
            route_nodes=4, node_limit=2, route_scale=2.5,
        ),
    ),
}  # fmt: skip


def draw(random_) -> Job:
    """A strategy of which few things are not the default, as planners return them."""
    while True:
        chosen = random_.sample(list(CHOICES), random_.randint(0, 9))
        try:
            strategy = Strategy(**{name: random_.choice(CHOICES[name]) for name in chosen})
            rows = strategy.dp * strategy.microbatches * random_.randint(1, 3) + (random_.random() < 0.05)
            return Job(strategy, random_.choice(list(MODELS.values())), rows, 64)
        except ValueError:
            pass


@cache
def drawn() -> list[Job]:
    random_ = random.Random(7)
    return [draw(random_) for _ in range(400)]


@pytest.mark.parametrize("key", SYSTEMS)
def test_what_is_written_is_read_back(key):
    """Of 400 drawn plans: written ones come back but for what is noted, with options that the system has, and nothing is
    left over; refused ones name a value."""
    system = SYSTEMS[key]
    written, refused, said = 0, 0, Counter()
    for job in drawn():
        try:
            found = system.write(job)
        except ValueError as error:
            refused += 1
            names = {part.split("=")[0].split()[-1] for part in str(error).split(", ") if "=" in part}
            assert names & DEFAULTS.keys() and "\n" not in str(error)
            continue
        written += 1
        back, left = read(system, found)
        values, again = job.values(), back.values()
        lost = {name for name in values if again[name] != values[name]}
        assert lost == {note.split("=")[0] for note in found.notes} and lost <= system.SYSTEM.noted.keys()
        assert not left
        changed = (name for name in values if values[name] != DEFAULTS[name] and name not in lost)
        said.update((name, values[name]) for name in changed)
    assert min(written, refused) > 40, (written, refused)
    for name in ("dp", "pp", "microbatches", "rows", "zero", "precision", "recompute"):
        assert any(one == name for one, _ in said), f"{name} was never written"


@pytest.mark.parametrize("key", SYSTEMS)
def test_a_table_says_its_version_and_every_choice_is_of_the_kind_of_its_option(key):
    system = SYSTEMS[key].SYSTEM
    assert system.version and system.date.startswith("2026") and len(system.options) > 100
    for one in system.options.values():
        for theirs in (one.choices or {}).values():
            system.check(one.name, theirs)
    derived = system.derive(Job(Strategy(), MODELS["plain"], 8, 64).values())
    assert derived.keys() <= DEFAULTS.keys() | system.by_value.keys()
    assert system.noted.keys() | system.refused.keys() | system.in_code.keys() <= DEFAULTS.keys()


# ---- one plan, in full

JOB = Job(
    Strategy(
        dp=2, tp=2, pp=2, cp=2, zero=1, sequence_parallel=True, microbatches=4, recompute="full",
        precision="bfloat16_main_grads",
    ),
    LLAMA, rows=64, length=8192,
)  # fmt: skip


def test_llama_as_a_command_of_megatron():
    text, notes, in_code = megatron.write(JOB)
    assert not notes and not in_code
    lines = text.replace(" \\\n", "\n").split("\n")
    assert lines[0] == "torchrun --nproc-per-node 16 pretrain_gpt.py"
    for node, launcher in {8: "--nnodes 2 --nproc-per-node 8", 6: "--nnodes 4 --nproc-per-node 4"}.items():
        on_nodes, (note,), _ = megatron.write(JOB, node)
        assert on_nodes == text.replace("--nproc-per-node 16", launcher)
        assert f"each of {16 // int(launcher[-1])} " in note
        assert megatron.read(on_nodes)[0] == megatron.read(text)[0]
    assert megatron.write(JOB, 16) == megatron.write(JOB, 32) == (text, notes, in_code)
    with pytest.raises(ValueError, match="node"):
        megatron.write(JOB, -8)
    said = {line.strip() for line in lines[1:]}
    wanted = """--tensor-model-parallel-size 2, --pipeline-model-parallel-size 2, --context-parallel-size 2,
    --cp-comm-type p2p, --use-distributed-optimizer, --sequence-parallel, --micro-batch-size 8,
    --global-batch-size 64, --recompute-granularity full, --recompute-method uniform, --bf16, --hidden-size 4096,
    --num-query-groups 8, --ffn-hidden-size 14336, --vocab-size 128256, --rotary-base 500000, --swiglu,
    --disable-bias-linear, --untie-embeddings-and-output-weights, --normalization RMSNorm, --hidden-dropout 0.0"""
    assert said >= {option.strip() for option in wanted.split(",")}
    job, left = megatron.read(text)
    assert job == JOB and not left


# ---- what others wrote


def test_a_command_that_somebody_else_wrote():
    """Defaults of Megatron-LM, not ours, where it says nothing; other words for the same; what is left is handed back."""
    text = """torchrun --nnodes 2 --nproc_per_node=4 --master-port 1 pretrain_gpt.py --num-layers 24 --hidden-size 1024
      --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --vocab-size 50257
      --global-batch-size 64 --tensor-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6
      --pipeline-model-parallel-size 2 --lr=0.00015 --bf16 --recompute-activations --save /x --data-path a b --use-flash-attn"""
    job, left = megatron.read(text)
    strategy = Strategy(
        dp=2, order="pp-dp-cp-tp", tp=2, pp=2, microbatches=8, schedule="interleaved", chunks=2,
        recompute="selective", precision="bfloat16_main_grads",
    )  # fmt: skip
    assert job.strategy == strategy and (job.rows, job.length) == (64, 1024)
    model = dict(
        d_model=1024, num_layers=24, num_heads=16, max_positions=1024, vocab_size=50_432, d_ff=4096,
        dropout=0.1,
    )  # fmt: skip
    assert job.model == GPTConfig(
        **model, norm="layer", bias=True, positions="learned", activation="gelu", tied=True
    )
    assert left == {"--lr": 0.00015, "--save": "/x", "--data-path": ["a", "b"], "--use-flash-attn": True}
    # no launcher
    assert megatron.read(" ".join(text.split("pretrain_gpt.py")[1].split()))[0].strategy.dp == 1


COMMAND = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --vocab-size 256"
)
SIZES_OF = {"d_model": 64, "num_layers": 2, "num_heads": 4}
SHARDED = "[parallelism]\ndata_parallel_shard_degree = 2\n[activation_checkpoint]\nmode = 'none'\n"
BAD_COMMANDS = {  # after `COMMAND`; what is said
    "--tensor-parallel-size 2": "has no option '--tensor-parallel-size'; did you mean '--tensor-model-parallel-size'?",
    "--tensor-model-parallel-size two": "argument --tensor-model-parallel-size: invalid int value: 'two'",
    "--bf16 yes": "has no option 'yes'",
    "--lr": "argument --lr: expected one argument",
    "--squared-relu": "--squared-relu = True, and minitrain has nothing like it",
    "--hidden-dropout 0.0": "--attention-dropout=0.1, --hidden-dropout=0.0: no dropout is this",
    "--recompute-granularity selective --recompute-modules mlp": "--recompute-modules mlp: of these only core_attn",
    "--recompute-granularity full --recompute-method block": "--recompute-method block: use uniform",
    "--num-experts 4 --moe-layer-freq [1,0]": "use a list of 0 and 1 in which, from one block on",
    "--num-experts 4 --moe-aux-loss-coeff 0.01": "minitrain's loss is of each row; use seq_aux_loss",
    "--num-experts 4 --moe-shared-expert-intermediate-size 100": "100 is no multiple of an expert's 256",
    "--fp8-format e4m3 --fp8-recipe custom": "--fp8-format=e4m3, --fp8-recipe=custom: no products is this",
    "--cp-comm-type p2p a2a": "--cp-comm-type=['p2p', 'a2a']: no core is this",
    "--multi-latent-attention": "minitrain's has keys and values of one width",
    "--num-distributed-optimizer-instances 2": "--num-distributed-optimizer-instances 2 without",
    "--tp-comm-overlap": "--tp-comm-overlap without --sequence-parallel",
    "--disable-bias-linear": "its LayerNorm has a bias",
}
BAD_LAUNCHES = {  # whole commands
    "--num-layers 2": "--hidden-size is missing, and Megatron-LM has no default for it",
    "2 --num-layers 2": "Megatron-LM has no option '2'",
    f"torchrun --nproc-per-node 6 x.py {COMMAND} --tensor-model-parallel-size 4": "6 ranks are no multiple of tp · pp",
    f"torchrun --nproc-per-node gpu x.py {COMMAND}": "--nproc-per-node gpu: say how many, dp follows",
    f"torchrun --nproc-per-node 2 x.py {COMMAND} --global-batch-size 3": "3 and --micro-batch-size 1 on dp=2 ranks",
}
BAD_JSON = {
    '{"zero_optimization": {"stagee": 2}}': "no option 'zero_optimization.stagee'; did you mean 'zero_optimization.stage'?",
    '{"zero_optimization": {"stage": "2"}}': "zero_optimization.stage = '2'; it is int",
    '{"zero_optimization": {"stage": true}}': "zero_optimization.stage = True; it is int",
    "{": "DeepSpeed: no JSON",
    "[]": "use an object of names and values",
    '{"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}': "the first is a multiple of the others",
    '{"zero_optimization": {"zero_hpz_partition_size": 8}}': "zero_optimization.zero_hpz_partition_size = 8, and",
    '{"fp16": {"enabled": true, "loss_scale": 128.0}}': "it does not change; minitrain's does",
}
BAD_TOML = {
    "[parallelism]\ntensor_parallel_degre = 2": "has no option 'parallelism.tensor_parallel_degre'; did you mean",
    "[": "torchtitan: no TOML",
    "[activation_checkpoint]\nmode = 'none'": "the rest of the ranks, whose number the TOML does not say",
    SHARDED.replace("[activation", "pipeline_parallel_degree = 2\n[activation"): "schedules are 1F1B, GPipe",
    SHARDED.replace("'none'", "'selective'"): "activation_checkpoint.mode=selective: no recompute is this",
}


@pytest.mark.parametrize(
    "read, cases",
    [
        (lambda more: megatron.read(f"{COMMAND} {more}"), BAD_COMMANDS),
        (megatron.read, BAD_LAUNCHES),
        (lambda text: deepspeed.read(text, SIZES_OF), BAD_JSON),
        (lambda text: torchtitan.read(text, SIZES_OF), BAD_TOML),
        (lambda _: deepspeed.read("{}", {"tp": 2}), {"tp": "in_code: 'tp' is not said in code"}),
        (lambda _: torchtitan.read("", {"length": 2}), {"length": "in_code: 'length' is not said in code"}),
    ],
)
def test_what_cannot_be_read_is_one_line(read, cases):
    for text, said in cases.items():
        with pytest.raises(ValueError) as error:
            read(text)
        assert said in str(error.value) and "\n" not in str(error.value), text


BURST = "Megatron-LM cannot say core='burst', inner=2; use another"
ZB_H1 = "cannot say schedule='zb_h1' (it has 1f1b and interleaved); use another value"
STAGES = "(stages 0 to 3, and with a pipeline 0 and 1)"


@pytest.mark.parametrize(
    "key, strategy, words",
    [
        ("megatron", dict(cp=2, core="burst", inner=2), BURST),
        ("megatron", dict(pp=2, microbatches=2, schedule="zb_h1"), ZB_H1),
        ("megatron", dict(dp=2, zero="NIG"), "zero='NIG'"),
        ("deepspeed", dict(dp=2, zero="III", node=2), f"zero='III' {STAGES}"),
        ("deepspeed", dict(dp=2, pp=2, zero=2, microbatches=2), f"zero=2 {STAGES}"),
        ("torchtitan", dict(dp=2, zero=1), "zero=1 (it has 0, 2, 3 and III)"),
        ("torchtitan", dict(recompute="selective"), "recompute='selective'"),
        ("torchtitan", dict(precision="float16"), "precision='float16'"),
        ("torchtitan", dict(cp=2, core="ulysses"), "core='ulysses'"),
        ("deepspeed", dict(cp=2), "cp=2 (sequence_parallel_size is Ulysses, contiguous)"),
        ("deepspeed", dict(products="fp8_tensor"), "products='fp8_tensor'"),
        ("megatron", dict(cp=2, layout="contiguous"), "layout='contiguous'"),
        ("megatron", dict(products="fp8_rows"), "products='fp8_rows'"),
        ("torchtitan", dict(tp=2), "tp=2 (its tp cuts the sequence as well)"),
    ],
)
def test_what_a_system_cannot_say_is_one_line(key, strategy, words):
    job = Job(Strategy(**{"precision": "bfloat16_main_grads"} | strategy), MODELS["plain"], 4, 64)
    with pytest.raises(ValueError) as error:
        SYSTEMS[key].write(job)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_changes_no_number_is_noted():
    strategy = Strategy(
        dp=2, tp=2, overlap=True, ep=2, ep_chunks=2, bucket_bytes=1000, precision="bfloat16_main_grads"
    )
    job = Job(strategy, MODELS["Mixtral"], 2, 64)
    notes = megatron.write(job).notes
    assert [note.split(":")[0] for note in notes] == ["ep_chunks=2", "overlap=True", "bucket_bytes=1000"]
    back, _ = megatron.read(megatron.write(job).text)
    assert back.strategy == replace(strategy, overlap=False, ep_chunks=1, bucket_bytes=25_000_000)


# ---- word by word: a mistake that writer and reader share comes back as the plan


def options_of(system, strategy: dict, model="plain") -> dict:
    """What is said more, or otherwise, than of one rank in float32."""
    say = lambda **fields: system.SYSTEM.write(Job(Strategy(**fields), MODELS[model], 8, 64))[0]
    plain, found = say(), say(**strategy)
    return {name: value for name, value in found.items() if plain.get(name) != value}


def test_the_words_of_megatron():
    said = lambda name, value, **more: options_of(megatron, {name: value, **more})
    numbers = {
        "bfloat16": {"--bf16": True, "--grad-reduce-in-bf16": True},
        "bfloat16_main_grads": {"--bf16": True, "--accumulate-allreduce-grads-in-fp32": True},
    }
    for precision, words in numbers.items():
        assert said("precision", precision) == words
    moments = {"--use-precision-aware-optimizer": True}
    moments |= {"--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"}
    assert said("precision", "bfloat16_short_moments") == numbers["bfloat16_main_grads"] | moments
    scale = {"--fp16": True, "--initial-loss-scale": 1024.0, "--loss-scale-window": 500.0}
    assert said("precision", "float16", loss_scale=1024.0, loss_scale_window=500) == scale
    assert said("precision", "float16")["--initial-loss-scale"] == FIRST_SCALE
    eight = lambda kind, recipe: {"--fp8-format": kind, "--fp8-recipe": recipe}
    assert said("products", "fp8_tensor") == eight("hybrid", "tensorwise")
    last = {"--fp8-amax-history-len": 16, "--fp8-amax-compute-algo": "max"}
    assert said("products", "fp8_delayed") == eight("hybrid", "delayed") | last
    assert said("products", "fp8_e4m3") == eight("e4m3", "tensorwise")
    assert said("products", "fp8_tiles") == eight("e4m3", "blockwise")
    assert said("products", "mxfp8") == eight("e4m3", "mxfp8")
    assert said("products", "nvfp4") == {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}
    words = {"ring": "p2p", "gathered": "allgather", "ulysses": "a2a"}
    for core, word in words.items():
        found = said("core", core, cp=2)
        assert found == {"--context-parallel-size": 2, "--cp-comm-type": [word], "WORLD_SIZE": 2}
    two = said("core", "usp", cp=4, ulysses=4)
    assert two["--cp-comm-type"] == ["a2a+p2p"] and two["--hierarchical-context-parallel-sizes"] == [4, 1]
    zero = lambda zero, **more: set(said("zero", zero, dp=4, **more).items()) - {("WORLD_SIZE", 4)}
    one, shards = {("--use-distributed-optimizer", True)}, "--data-parallel-sharding-strategy"
    fsdp = one | {("--use-megatron-fsdp", True)}
    assert zero(1) - {("--micro-batch-size", 2)} == one
    assert zero(2) - {("--micro-batch-size", 2)} == fsdp | {(shards, "optim_grads")}
    whole = fsdp | {(shards, "optim_grads_params")}
    assert zero(3) - {("--micro-batch-size", 2)} == whole
    copies = {("--num-distributed-optimizer-instances", 2)}
    assert zero("III", node=2) - {("--micro-batch-size", 2)} == whole | copies, "two nodes of two"
    again = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    assert said("recompute", "full") == again
    assert said("recompute", "every:2") == again | {"--recompute-num-layers": 2}
    assert said("recompute", "selective") == {"--recompute-granularity": "selective"}
    assert said("offload", "optimizer") == {"--optimizer-cpu-offload": True}
    chunks = said("schedule", "interleaved", pp=2, chunks=2, microbatches=2)
    assert chunks["--num-virtual-stages-per-pipeline-rank"] == 2
    assert said("order", "pp-dp-cp-tp", dp=2, pp=2).get("--use-tp-pp-dp-mapping") is None
    plain = megatron.SYSTEM.write(Job(Strategy(), MODELS["plain"], 8, 64))[0]
    assert plain["--use-tp-pp-dp-mapping"] is True and plain["--make-vocab-size-divisible-by"] == 1


def test_the_words_of_megatron_for_models():
    def said(model):
        return megatron.SYSTEM.write(Job(Strategy(), MODELS[model], 8, 64))[0]

    gpt2 = said("GPT-2")
    assert (gpt2["--normalization"], gpt2["--position-embedding-type"]) == ("LayerNorm", "learned_absolute")
    assert (gpt2["--attention-dropout"], gpt2["--hidden-dropout"], gpt2["--norm-epsilon"]) == (0.1, 0.1, 1e-5)
    assert not {"--swiglu", "--openai-gelu", "--disable-bias-linear"} & gpt2.keys()
    odd = said("RMS with biases")
    assert odd["--openai-gelu"] and odd["--position-embedding-type"] == "none" and "--swiglu" not in odd
    grouped = said("GQA")
    got = (grouped["--num-query-groups"], grouped["--kv-channels"], grouped["--ffn-hidden-size"])
    assert got == (2, 16, 96)
    assert (grouped["--rotary-base"], grouped["--rotary-percent"]) == (500_000, 0.5)
    latent = {
        "--kv-lora-rank": 16, "--q-lora-rank": 24, "--qk-pos-emb-head-dim": 4, "--qk-head-dim": 8,
        "--v-head-dim": 8,
    }  # fmt: skip
    assert latent.items() <= said("latent").items()
    mixtral, switch, deepseek = said("Mixtral"), said("Switch"), said("DeepSeek")
    assert (mixtral["--moe-aux-loss-coeff"], mixtral["--moe-z-loss-coeff"]) == ([0.01], 1e-3)
    assert mixtral["--moe-layer-freq"] == "[1, 1, 1, 1, 1, 1, 1, 1]" and mixtral["--moe-router-topk"] == 2
    assert switch["--moe-layer-freq"] == "[0, 1, 0, 1, 0, 1, 0, 1]" and switch["--moe-router-pre-softmax"]
    found = (switch["--moe-expert-capacity-factor"], switch["--moe-router-load-balancing-type"])
    assert found == (1.5, ["none"]) and deepseek["--moe-layer-freq"] == "[0, 0, 0, 1, 1, 1, 1, 1]"
    asked = {"num-groups": 4, "group-topk": 2, "topk-scaling-factor": 2.5, "score-function": "sigmoid"}
    asked |= {"enable-expert-bias": True, "bias-update-rate": 1e-3, "topk": 4}
    assert {f"--moe-router-{name}": value for name, value in asked.items()}.items() <= deepseek.items()
    sizes = deepseek["--moe-ffn-hidden-size"], deepseek["--moe-shared-expert-intermediate-size"]
    assert sizes == (32, 2 * 32)


def test_what_megatron_means_where_a_command_says_nothing():
    read = lambda more: megatron.read(f"{COMMAND} {more}")[0]
    half = read("--fp16")
    assert (half.strategy.loss_scale, half.strategy.loss_scale_window) == (2.0**32, 1000)
    assert read("--fp16 --initial-loss-scale 512 --loss-scale-window 7").strategy.loss_scale == 512
    model = half.model
    assert (model.d_ff, model.head_dim, model.norm_eps, model.dropout) == (256, 16, 1e-5, 0.1)
    assert (model.norm, model.positions, model.activation, model.tied) == ("layer", "learned", "gelu", True)
    turned = read("--position-embedding-type rope").model
    assert (turned.rope_theta, turned.rope_fraction) == (10_000, 1.0)
    assert read("--group-query-attention").model.num_kv_heads == 1
    assert read("--vocab-size 300 --tensor-model-parallel-size 2").model.vocab_size == 512, "padded to 128 tp"
    assert read("--vocab-size 300 --make-vocab-size-divisible-by 8").model.vocab_size == 304
    experts = read("--num-experts 4").model.experts
    assert experts == ExpertsConfig(4, 2, expert_width=256, balance_alpha=0.0, capacity_factor=0.0)
    deepseek = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    assert read(f"--num-experts 4 {deepseek}").model.experts.bias_speed == 1e-3
    every = read("--num-experts 4 --moe-layer-freq [0,1]").model.experts
    assert (every.expert_every, every.dense_first) == (1, 1)
    latent = "--multi-latent-attention --rope-type rope --qk-layernorm --position-embedding-type rope"
    model = read(latent).model
    assert (model.kv_latent, model.rope_head_dim, model.head_dim, model.query_latent) == (32, 64, 128, 0)
    assert read("--recompute-granularity full --recompute-method uniform").strategy.recompute == "full"
    assert read("--recompute-activations").strategy.recompute == "selective"
    (job, _) = megatron.read(f"torchrun --nproc-per-node 4 x.py {COMMAND} --micro-batch-size 3")
    assert (job.strategy.dp, job.rows, job.strategy.microbatches) == (4, 12, 1)


def test_the_words_of_deepspeed_and_what_it_means_by_itself():
    said = lambda name, value, **more: options_of(deepspeed, {name: value, **more})
    sixteen = {"bf16.enabled": True, "data_types.grad_accum_dtype": "bf16"}
    assert said("precision", "bfloat16") == sixteen
    assert said("precision", "bfloat16_main_grads") == sixteen | {"data_types.grad_accum_dtype": "fp32"}
    half = {"fp16.enabled": True, "fp16.initial_scale_power": 10, "fp16.loss_scale_window": 500}
    assert said("precision", "float16", loss_scale=1024.0, loss_scale_window=500) == half
    cpu = lambda *what: {f"zero_optimization.offload_{one}.device": "cpu" for one in what}
    assert cpu("optimizer").items() <= said("offload", "optimizer", dp=2, zero=2).items()
    assert cpu("optimizer", "param").items() <= said("offload", "optimizer+parameters", dp=2, zero=3).items()
    assert said("core", "ulysses", cp=2, layout="contiguous")["sequence_parallel_size"] == 2
    assert [said("zero", stage, dp=2)["zero_optimization.stage"] for stage in (1, 2, 3)] == [1, 2, 3]
    read = lambda text: deepspeed.read(text, SIZES_OF | {"length": 16})[0].strategy
    half = read('{"fp16": {"enabled": true}, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}')
    found = (half.loss_scale, half.loss_scale_window, half.dp)
    assert found == (0.0 if FIRST_SCALE == 2**16 else 2.0**16, 1000, 2)
    assert (half.bucket_bytes, half.zero) == (500_000_000 * 2, 0)
    steps = read('{"train_batch_size": 12, "gradient_accumulation_steps": 3}')
    assert (steps.dp, steps.microbatches) == (1, 3), "a microbatch is then what is left"


def test_deepspeed_fw():
    """A batch is microbatch times accumulation times data ranks: two of the JSON tell the third, and one more is refused."""
    test_the_words_of_deepspeed_and_what_it_means_by_itself()
    for micro, steps, dp in product(range(1, 4), repeat=3):
        given = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        read = lambda batch: deepspeed.read(
            json.dumps(given | {"train_batch_size": batch}), SIZES_OF | {"length": 16}
        )
        strategy = read(micro * steps * dp)[0].strategy
        assert (strategy.dp, strategy.microbatches) == (dp, steps)
        if micro * steps > 1:
            with pytest.raises(ValueError, match="the first is a multiple of the others"):
                read(micro * steps * dp + 1)


def test_the_words_of_torchtitan_and_what_it_means_by_itself():
    said = lambda name, value, **more: options_of(torchtitan, {"precision": "float32", name: value, **more})
    fp8, mx = "quantize.linear.float8", "quantize.linear.mx"
    recipes = {"fp8_tensor": (fp8, "tensorwise"), "fp8_rows": (fp8, "rowwise"), "mxfp8": (mx, "mxfp8_cublas")}
    for products, (converter, recipe) in recipes.items():
        words = {"model.converters": [converter], f"{converter}.recipe_name": recipe}
        assert said("products", products) == words
    assert said("offload", "optimizer+parameters", dp=2, zero=3)["training.enable_cpu_offload"] is True
    p = "parallelism."
    degrees = lambda zero, **more: [
        said("zero", zero, dp=4, **more).get(f"{p}{name}")
        for name in (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "fsdp_reshard_after_forward",
        )
    ]
    assert degrees(0)[:1] == [4] and degrees(2) == [None, 4, "never"] and degrees(3) == [None, 4, "always"]
    assert degrees("III", node=2) == [2, 2, "always"]
    schedules = {"1f1b": "1F1B", "gpipe": "GPipe", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
    schedules |= {"interleaved": "Interleaved1F1B", "zb_interleaved": "InterleavedZeroBubble"}
    for schedule, name in schedules.items():
        more = dict(chunks=2) if "interleaved" in schedule else {}
        found = said("schedule", schedule, pp=2, microbatches=4, **more)
        size = 4 if schedule in ("1f1b", "gpipe") else 2
        asked = {f"{p}pipeline_parallel_schedule": name, f"{p}pipeline_parallel_layers_per_stage": size}
        assert asked.items() <= found.items() and found[f"{p}pipeline_parallel_microbatch_size"] == 2
    for core, word in (("gathered", "allgather"), ("ring", "alltoall")):
        assert said("core", core, cp=2)[f"{p}context_parallel_rotate_method"] == word
    tp = said("overlap", True, tp=2, sequence_parallel=True)
    assert tp == {f"{p}tensor_parallel_degree": 2, f"{p}enable_async_tensor_parallel": True}
    job = torchtitan.read(SHARDED, SIZES_OF | {"max_positions": 2048})[0]
    assert (job.length, job.rows, job.strategy.zero, job.strategy.precision) == (
        2048, 16, 3, "bfloat16_main_grads",
    )  # fmt: skip
    kept = SHARDED.replace("[activation", "fsdp_reshard_after_forward = 'never'\n[activation")
    assert torchtitan.read(kept, SIZES_OF | {"max_positions": 2048})[0].strategy.zero == 2


def test_any_plan_is_a_plan_file_and_back():
    for job in drawn():
        assert training_job.read(training_job.write(job)) == job
    assert training_job.read(training_job.write(JOB)) == JOB
    tree = json.loads(training_job.write(Job(Strategy(dp=2), GPTConfig(d_model=128), 4, 16)))
    assert tree == {"format": 1, "strategy": {"dp": 2}, "model": {"d_model": 128}, "rows": 4, "length": 16}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"strategy": {"zeroo": 2}}, "a plan has no 'zeroo'; did you mean 'zero'?"),
        ({"model": {"width": 2}}, "a plan has no 'width'; allowed:"),
        ({"model": {"experts": {"top": 2}}}, "a plan has no 'top'; did you mean"),
        ({"row": 2}, "use an object of format, strategy, model, rows, length"),
        ({"format": 2}, "plan: format 2; this version reads 1"),
        ({"strategy": []}, "plan: []; use an object of names and values"),
        ({"rows": 0}, "rows=0: use a whole number from 1"),
        ({"length": "8"}, "length='8': use a whole number"),
        ({"strategy": {"dp": 3}}, "a batch of 2 rows for dp=3 x microbatches=1"),
    ],
)
def test_a_plan_file_that_is_none_is_one_line(change, words):
    tree = {"format": 1, "strategy": {}, "model": {}, "rows": 2, "length": 8}
    with pytest.raises(ValueError) as error:
        training_job.read(json.dumps(tree | change))
    assert words in str(error.value) and "\n" not in str(error.value)
    for text, said in (("{", "plan: no JSON"), ("3", "use an object of"), ("{}", "use an object of")):
        with pytest.raises(ValueError, match=said):
            training_job.read(text)
