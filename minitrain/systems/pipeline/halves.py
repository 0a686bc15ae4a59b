"""The halves of a pair (F B) in turns: while an all-to-all of one is under way, the other computes.

    run_in_turns(run, turn, b, f)           run(b) and run(f), only one of them at any moment; b goes first
    all_to_all(.., meanwhile=yield_turn)    in their layers: issue, give way, wait; forward and backward alike

    backward of b   combine +1|                 |-1 experts +2|              |-2 attention
    forward of a              | attention +1    |             |-1 experts +2 |             |-2 sum

No layer is cut: the first half runs on a thread of its own, and a baton says whose turn it is. So each half
computes what it computes alone, bit for bit, in an order that the program sets and no clock: all ranks of a
stage make the same calls in the same order. With as many expert layers in both halves every transfer of rows
(with two levels, between nodes) hides behind products of the other half, but for the counts of F's rows, and
the last transfers of a half with more layers. Memory: F's activations come as B's go, a peak between B before
F and F before B; in ZeRO-3 units of both are whole. DeepSeek-V3, arXiv:2412.19437, section 3.2.1, Figure 4.
Differs: no weights' gradients put off (overlapped_experts.py can), and no kernels have cores of their own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from threading import Semaphore, Thread

import torch

from minitrain.pipeline.runtime import Runner, RunnerHooks
from minitrain.pipeline.schedule import Pair
from minitrain.ranks.torch_private import dispatch_modes


class Half:  # a part of a pair; between its turns it waits for the baton
    def __init__(self, run: Callable[[], None], turn: Callable[[], AbstractContextManager]):
        self.run, self.turn, self.baton, self.around = run, turn, Semaphore(0), ExitStack()


class Halves(RunnerHooks):
    def __init__(self):
        self.going: list[Half] = []  # those not done yet; the first has the baton
        self.error: BaseException | None = None

    def run_pair(self, runner: Runner, pair: Pair) -> bool:
        """Not where both are of one stage, whose parameters ZeRO-3 gathers for one pass at a time."""
        if pair.forward.stage == pair.backward.stage:
            return False
        self.run_in_turns(runner.run_action, runner.turn, pair.backward, pair.forward)
        return True

    def run_in_turns(self, run: Callable, turn: Callable, *actions: object) -> None:
        """Runs run(action) of both to the end, or raises what failed; turn(action) is around each turn."""
        first, second = (Half(partial(run, action), partial(turn, action)) for action in actions)
        self.going, self.error = [first, second], None
        modes, gpu = dispatch_modes(), torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def on_another_thread() -> None:
            """With the modes (ledger, dry run) that a new thread lacks. On a GPU a backward holds autograd's
            only thread for that device until it ends: the other half must not ask for gradients."""
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                if gpu is not None:
                    torch.cuda.set_device(gpu)
                run(actions[0])

        first.run = on_another_thread
        thread = Thread(target=self._all_of, args=(first,), daemon=True)
        thread.start()
        first.baton.release()
        self._all_of(second)
        thread.join()
        if self.error is not None:
            raise self.error

    def yield_turn(self) -> None:
        """Called while a transfer of one half is under way: the other has its turn, until it gives way."""
        if len(self.going) == 2:
            this, other = self.going
            self.going = [other, this]
            this.around.close()
            other.baton.release()
            self._begin_turn(this)

    def _begin_turn(self, half: Half) -> None:
        half.baton.acquire()
        half.around.enter_context(half.turn())
        if self.error is not None:
            raise RuntimeError("the other half of the pair has failed")

    def _all_of(self, half: Half) -> None:
        try:
            self._begin_turn(half)
            half.run()
        except BaseException as error:
            self.error = self.error or error
        finally:
            half.around.close()
            self.going.remove(half)
            for other in self.going:
                other.baton.release()
