"""Training with optimizer states in files: the bits of training with states in memory, each rank's own 1/n."""

import copy
import errno
import os

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.data.batches import Rows
from minitrain.model.gpt import GPT
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.files import BLOCK, FileOptimizer, FileStore, update_in_files
from tests.parallel import Problem, difference, one_process, run_steps, small, train_sharded
from tests.systems.memory.test_file_layers import reads
from tests.systems.memory.test_files import flip, full_after, path_of

BUFFERS = dict(buffer_bytes=4096, buffers=6)


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def make_model(dtype=torch.float64):
    return GPT(small(), seed=3, dtype=dtype)


def make_optimizer(model, **settings):
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    groups = [dict(params=matrices), dict(params=vectors, weight_decay=0.0)]
    return AdamW(groups, lr=1e-2, **settings)


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(model, optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("piece", [1, 100])
@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.float64, {}),
        (torch.bfloat16, dict(master_dtype=torch.float32)),
        (torch.bfloat16, dict(master_dtype=torch.float32, moment_dtypes=(torch.float32, torch.bfloat16))),
    ],
)
def test_every_bit_is_that_of_states_in_memory(tmp_path, piece, dtype, settings):
    if piece == 1:  # a file of many blocks: a few parameters are enough
        torch.manual_seed(0)
        models = [torch.nn.Linear(3, 2).to(dtype) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
    else:
        models = [make_model(dtype) for _ in range(2)]
    plain = make_optimizer(models[0], **settings)
    with FileStore(tmp_path, **BUFFERS) as store:
        filed = FileOptimizer(make_optimizer(models[1], **settings), store, piece)
        assert same(train(models[0], plain), train(models[1], filed))
        for mine, other in zip(models[0].parameters(), models[1].parameters()):
            one, two = plain.state[mine], filed.get_state(other)
            assert one.keys() == two.keys() and one["step"] == two["step"] == 3
            assert all(torch.equal(one[name], two[name]) for name in one if name != "step")
            assert all(one[name].dtype == two[name].dtype for name in one if name != "step")
    assert not list(tmp_path.iterdir())


class TestRanks:
    """ZeRO 1 and 3."""

    @staticmethod
    def filed(folder, kind=Zero1, piece=100):
        def make(model, group, make_optimizer):
            zero = kind(model, group, make_optimizer)
            store = FileStore(folder, group.rank(), **BUFFERS)
            zero.optimizer = FileOptimizer(zero.optimizer, store, piece)
            return zero

        return make

    @pytest.mark.parametrize("kind, ranks", [(Zero1, 2), (Zero3, 4)])
    def test_equals_one_process_and_memory_to_the_bit(self, tmp_path, kind, ranks):
        problem = Problem(batch_sizes=(12, 11, 13))

        def rank(folder):
            in_files = train_sharded(problem, self.filed(folder, kind))
            return in_files, train_sharded(problem, lambda *args: kind(*args))

        reference = one_process(problem)
        for in_files, in_memory in launch.run(rank, tmp_path, ranks=ranks):
            assert in_files.losses == in_memory.losses and same(in_files.params, in_memory.params)
            assert difference(in_files, reference) < 1e-12
        assert not list(tmp_path.iterdir())

    def test_each_rank_reads_and_writes_its_part_once_a_step(self, tmp_path, ranks=4):
        """Moments in float64 are 16 bytes per element: P/n elements are written in each of 3 steps and read
        in all but the first; on the device are no states."""
        problem = Problem(batch_sizes=(12, 11, 13), microbatches=2)

        def rank(folder):
            model, group = problem.model(), collectives.world()
            zero = self.filed(folder)(model, group, lambda shards: AdamW(shards, lr=1e-2))
            with Ledger() as ledger:
                run_steps(problem, model, group, zero, zero)
            store = zero.optimizer.store
            store.flush()
            shards = sum(flat.shard.numel() for flat in zero.shards)
            counted = ledger.copied_bytes("from_disk"), ledger.copied_bytes("to_disk")
            own = store.read_bytes, store.written_bytes
            return shards, counted, own, ledger.live_by_kind["optimizer state"], ledger.host_bytes

        trained = sum(param.numel() for param in problem.model().parameters() if param.requires_grad)
        for shards, counted, own, on_device, on_host in launch.run(rank, tmp_path, ranks=ranks):
            assert 0 <= shards * ranks - trained < 2 * ranks  # padding
            assert counted == own == (2 * 16 * shards, 3 * 16 * shards)
            assert on_device == 0 and on_host == 6 * 4096

    def test_a_checkpoint_is_the_same_and_goes_on_anywhere(self, tmp_path):
        problem = Problem()

        def rank(folder):
            group, results = collectives.world(), []
            stages = [Zero1, self.filed(folder)]
            for save, load in ((1, 0), (0, 1), (1, 1)):
                model = problem.model()
                zero = stages[save](model, group, lambda shards: AdamW(shards, lr=1e-2))
                run_steps(problem, model, group, zero, zero)
                whole = states.full_state_dict(zero)
                close(zero)
                again = problem.model()
                other = stages[load](again, group, lambda shards: AdamW(shards, lr=1e-2))
                states.load_full_state_dict(other, whole)
                run_steps(problem, again, group, other, other)
                results.append(states.full_tensors(other))
                close(other)
            return all(same(results[0], result) for result in results)

        def close(zero):
            if isinstance(zero.optimizer, FileOptimizer):
                zero.optimizer.store.close()

        assert launch.run(rank, tmp_path, ranks=2) == [True, True]


# ---- disks that fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_step", [True, False])
@pytest.mark.parametrize("room", [0, 1, 7, 20])
def test_a_disk_that_fills_in_the_middle_of_a_step_costs_nothing(tmp_path, monkeypatch, room, first_step):
    models = [make_model() for _ in range(2)]
    expected = train(models[0], make_optimizer(models[0]), 4)
    with FileStore(tmp_path, **BUFFERS) as store:
        filed = FileOptimizer(make_optimizer(models[1]), store, 100)
        steps = 0 if first_step else 2
        train(models[1], filed, steps)
        store.flush()
        filed.zero_grad()
        gradients(models[1], steps)
        for more in (room, room + 1, 0):
            monkeypatch.setattr(os, "pwrite", full_after(more * BLOCK))
            with pytest.raises(OSError, match="make room and go on: nothing is lost") as error:
                filed.step()
            assert error.value.errno == errno.ENOSPC and "\n" not in str(error.value)
            monkeypatch.undo()
            if more:
                with pytest.raises(ValueError, match="call step\\(\\) to finish it first"):
                    filed.zero_grad()
        filed.step()
        assert same(train(models[1], filed, 3 - steps, first=steps + 1), expected)


@pytest.mark.parametrize("block, name", [(8, "exp_avg"), (9, "exp_avg_sq")])
def test_a_changed_file_stops_the_step_and_a_checkpoint_goes_on(tmp_path, block, name):
    models = [make_model() for _ in range(2)]
    expected = train(models[0], make_optimizer(models[0]), 3)
    with FileStore(tmp_path, **BUFFERS) as store:
        filed = FileOptimizer(make_optimizer(models[1]), store, 100)
        train(models[1], filed, 2)
        saved = [filed.get_state(param) for param in models[1].parameters()], copy.deepcopy(models[1])
        store.flush()
        flip(path_of(store), BLOCK * block + 3)
        gradients(models[1], 2)
        for _ in range(3):
            with pytest.raises(OSError, match=rf"'\d+\.\d+\.{name}' in .*rank 0. is not what was"):
                filed.step()
        models[1].load_state_dict(saved[1].state_dict())
        for param, state in zip(models[1].parameters(), saved[0]):
            filed.set_state(param, state)
        assert same(train(models[1], filed, 1, first=2), expected)


def test_pieces_are_read_ahead_and_hooks_of_a_step_see_none(tmp_path):
    model, calls = torch.nn.Linear(10, 9, bias=False), []
    inner = AdamW(model.parameters(), lr=1e-2)
    inner.register_step_pre_hook(lambda *_: calls.append("step"))
    with FileStore(tmp_path, **BUFFERS) as store:
        filed = FileOptimizer(inner, store, 30)
        train(model, filed, 1)
        gradients(model, 1)
        with Ledger() as ledger:
            filed.step()
    assert reads(ledger) == "+-+-" + "++--" * 2 and not calls  # two moments; those of the next piece at once


def test_states_that_are_written_end_a_step_that_has_stopped(tmp_path, monkeypatch):
    """And numbers that are no piece of the parameter stay whole; before its first step it has no state."""
    model = torch.nn.Linear(10, 9, bias=False)
    with FileStore(tmp_path, buffer_bytes=4096, buffers=4) as store:
        filed = FileOptimizer(AdamW(model.parameters(), lr=1e-2), store, 15)
        assert filed.get_state(model.weight) == {}
        train(model, filed, 1)
        state = filed.get_state(model.weight)
        for end in ({}, state):
            filed.set_state(model.weight, state | {"step": torch.tensor(3.0)})
            assert filed.get_state(model.weight)["step"] == 3
            store.flush()
            gradients(model, 1)
            monkeypatch.setattr(os, "pwrite", full_after(BLOCK))
            with pytest.raises(OSError):
                filed.step()
            monkeypatch.undo()
            with pytest.raises(ValueError, match="call step\\(\\) to finish it first"):
                filed.zero_grad()
            filed.set_state(model.weight, end)
            assert filed.get_state(model.weight).keys() == end.keys()
            filed.zero_grad()


# ---- through parallelize ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        dict(dp=2, zero=1, precision="bfloat16"),
        dict(dp=2, zero=3, recompute="full"),
        dict(tp=2, sequence_parallel=True),
        dict(pp=2, microbatches=2, schedule="1f1b"),
        dict(dp=2, zero=2, precision="bfloat16_stochastic"),
        dict(dp=2, zero=1, precision="fp8_lm"),
    ],
    ids=lambda words: " ".join(f"{name}={value}" for name, value in words.items()),
)
def test_any_layout_trains_in_files_as_in_memory(tmp_path, words):
    def rank(folder):
        found = []
        for in_files in (True, False):
            run = parallelize(small(), Strategy(**words), lambda params: AdamW(params, lr=1e-2), seed=3)
            store = update_in_files(run.sync, folder, 300) if in_files else None
            rows = Rows(Problem().batch, 8, 8)
            losses = [run.total(run.step(run.batch(rows, 0), 0.5).loss).item() for _ in range(3)]
            state = run.state_dict()
            read = store.read_bytes if store else 0
            found.append((losses, state, read))
        (losses, state, read), (in_memory, other, _) = found
        return losses == in_memory and equal(state, other), read

    ranks = Strategy(**words).ranks
    assert all(same and read for same, read in launch.run(rank, tmp_path, ranks=ranks))


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
