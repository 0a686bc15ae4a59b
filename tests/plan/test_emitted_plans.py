"""Plans as commands of Megatron-LM, and back: what comes back is the plan, what cannot be said is refused or noted, and
every option that is written is one that it has."""

import json
import random
from collections import Counter
from dataclasses import asdict, fields, replace
from functools import cache

import pytest

from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.plan.emit import megatron, training_job
from minitrain.plan.emit.training_job import DEFAULTS, EXPERTS, MODEL, SIZES, STRATEGY, Job, from_values
from minitrain.plan.strategy import Strategy
from minitrain.precision.policies import FIRST_SCALE, PRODUCTS

LLAMA = presets["llama3-8b"]


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
    return [draw(random_) for _ in range(600)]


def test_what_is_written_is_read_back():
    """Of 600 drawn plans: written ones come back but for what is noted, with options that the system has, and nothing is
    left over; refused ones name a value."""
    written, refused, said = 0, 0, Counter()
    for job in drawn():
        try:
            found = megatron.write(job)
        except ValueError as error:
            refused += 1
            names = {part.split("=")[0].split()[-1] for part in str(error).split(", ") if "=" in part}
            assert names & DEFAULTS.keys() and "\n" not in str(error)
            continue
        written += 1
        back, left = megatron.read(found.text)
        values, again = job.values(), back.values()
        lost = {name for name in values if again[name] != values[name]}
        assert lost == {note.split("=")[0] for note in found.notes} and lost <= megatron.NOTED.keys()
        assert not left
        changed = (name for name in values if values[name] != DEFAULTS[name] and name not in lost)
        said.update((name, values[name]) for name in changed)
    assert min(written, refused) > 40, (written, refused)
    for name in ("dp", "pp", "microbatches", "rows", "zero", "precision", "recompute"):
        assert any(one == name for one, _ in said), f"{name} was never written"


def test_every_choice_is_of_the_kind_of_its_option():
    assert len(megatron.OPTIONS) > 100
    for one in megatron.OPTIONS.values():
        for theirs in (one.choices or {}).values():
            megatron.check(one.name, theirs)
    derived = megatron.derive(Job(Strategy(), MODELS["plain"], 8, 64).values())
    assert derived.keys() <= DEFAULTS.keys() | megatron.SAYING.keys()
    assert megatron.NOTED.keys() | megatron.REFUSED.keys() <= DEFAULTS.keys()


# ---- one plan, in full

JOB = Job(
    Strategy(
        dp=2, tp=2, pp=2, cp=2, zero=1, sequence_parallel=True, microbatches=4, recompute="full",
        precision="bfloat16_main_grads",
    ),
    LLAMA, rows=64, length=8192,
)  # fmt: skip


def test_llama_as_a_command_of_megatron():
    text, notes = megatron.write(JOB)
    assert not notes
    lines = text.replace(" \\\n", "\n").split("\n")
    assert lines[0] == "torchrun --nproc-per-node 16 pretrain_gpt.py"
    for node, launcher in {8: "--nnodes 2 --nproc-per-node 8", 6: "--nnodes 4 --nproc-per-node 4"}.items():
        on_nodes, (note,) = megatron.write(JOB, node)
        assert on_nodes == text.replace("--nproc-per-node 16", launcher)
        assert f"each of {16 // int(launcher[-1])} " in note
        assert megatron.read(on_nodes)[0] == megatron.read(text)[0]
    assert megatron.write(JOB, 16) == megatron.write(JOB, 32) == (text, notes)
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


@pytest.mark.parametrize("name", [*MODELS, "llama3-70b", "mixtral-8x7b", "deepseek-v3", "gpt3-175b"])
def test_every_kind_of_model_goes_to_megatron_and_back(name):
    model = MODELS.get(name) or presets[name]
    job = Job(Strategy(dp=2, precision="bfloat16_main_grads"), model, rows=2, length=64)
    back, left = megatron.read(megatron.write(job).text)
    assert back.values() == job.values() and not left


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


@pytest.mark.parametrize(
    "read, cases",
    [(lambda more: megatron.read(f"{COMMAND} {more}"), BAD_COMMANDS), (megatron.read, BAD_LAUNCHES)],
)
def test_what_cannot_be_read_is_one_line(read, cases):
    for text, said in cases.items():
        with pytest.raises(ValueError) as error:
            read(text)
        assert said in str(error.value) and "\n" not in str(error.value), text


BURST = "Megatron-LM cannot say core='burst', inner=2; use another"
ZB_H1 = "cannot say schedule='zb_h1' (it has 1f1b and interleaved); use another value"


@pytest.mark.parametrize(
    "strategy, words",
    [
        (dict(cp=2, core="burst", inner=2), BURST),
        (dict(pp=2, microbatches=2, schedule="zb_h1"), ZB_H1),
        (dict(dp=2, zero="NIG"), "zero='NIG'"),
        (dict(cp=2, layout="contiguous"), "layout='contiguous'"),
        (dict(products="fp8_rows"), "products='fp8_rows'"),
    ],
)
def test_what_it_cannot_say_is_one_line(strategy, words):
    job = Job(Strategy(**{"precision": "bfloat16_main_grads"} | strategy), MODELS["plain"], 4, 64)
    with pytest.raises(ValueError) as error:
        megatron.write(job)
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


def options_of(strategy: dict, model="plain") -> dict:
    """What is said more, or otherwise, than of one rank in float32."""
    say = lambda **fields: megatron.options_of(Job(Strategy(**fields), MODELS[model], 8, 64))[0]
    plain, found = say(), say(**strategy)
    return {name: value for name, value in found.items() if plain.get(name) != value}


def test_the_words_of_megatron():
    said = lambda name, value, **more: options_of({name: value, **more})
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
    plain = megatron.options_of(Job(Strategy(), MODELS["plain"], 8, 64))[0]
    assert plain["--use-tp-pp-dp-mapping"] is True and plain["--make-vocab-size-divisible-by"] == 1


def test_the_words_of_megatron_for_models():
    def said(model):
        return megatron.options_of(Job(Strategy(), MODELS[model], 8, 64))[0]

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
    assert found == (1.5, ["none"])
    assert deepseek["--moe-layer-freq"] == "[0, 0, 0, 1, 1, 1, 1, 1]"
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


def test_names_are_flat_and_what_has_no_effect_is_the_default():
    count = sum(len(fields(kind)) for kind in (Strategy, GPTConfig, ExpertsConfig)) - 1 + len(SIZES)
    assert len(DEFAULTS) == count == len(STRATEGY) + len(MODEL) + len(EXPERTS) + len(SIZES)
    odd = Strategy(
        dp=2, layout="striped", core="gathered", schedule="gpipe", loss_scale_window=7, precision="float16",
        loss_scale=65536.0,
    )  # fmt: skip
    same = Strategy(dp=2, loss_scale_window=7, precision="float16")
    job = Job(odd, MODELS["Mixtral"], 4, 8)
    assert job.values() == Job(same, MODELS["Mixtral"], 4, 8).values()
    assert job.values()["expert_width"] == MODELS["Mixtral"].d_ff
    assert job.values()["loss_scale_window"] == 7, "it has an effect"
    assert from_values(job.values()).values() == job.values()
    assert from_values({}).strategy == Strategy() and asdict(from_values({}).model) == asdict(GPTConfig())
    with pytest.raises(ValueError, match="a plan has no 'zeroo'; did you mean 'zero'?"):
        from_values({"zeroo": 1})
