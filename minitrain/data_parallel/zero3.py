"""ZeRO stage 3, fully sharded data parallelism: parameters are whole only while a layer needs them.

    forward    all_gather(W shard) -> W    y = layer(x)    free W             the next layer's W is on its way
    backward   all_gather(W shard) -> W    dx, dW          free W    reduce_scatter(dW) -> grad shard[P/n]
    step       optimizer.step() on the shards, and nothing to gather: the next forward does

What is gathered at once is a unit: a module, without the units inside it. A rank has its shards, 16/n bytes
per parameter with Adam in mixed precision, and one unit whole, two with prefetch. What several units share (a
tied table) has a buffer of its own, gathered for each in forward and whole in backward until its last use. A
gathered buffer keeps its address: freeing it shrinks its storage to nothing, gathering grows it again, so the
views of a weight that autograd saved in forward find the data again. A unit is called as a module.
Sends 3 (n-1)/n of the parameters per step (two gathers, one reduce-scatter), with `reshard=False` 2 (n-1)/n:
parameters stay whole from forward to backward. Recomputation gathers nothing more. Accumulation: as in
zero2.py, and every microbatch gathers anew, with `reshard=False` once. In a pipeline units are gathered and
freed in each action of their stage, whose gradients are scattered when its backward (or W) is done, or once
for all microbatches (`keep_gathered`).
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3 and 7.2.2 (P_os+g+p); Zhao et al. 2023, PyTorch
FSDP, arXiv:2304.11277, section 3.2.1 and 3.3. Differs: SUM instead of mean; the last unit is freed after
forward like all others; the order of prefetch is the order of the last forward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat, views
from minitrain.data_parallel.naive import grouped
from minitrain.data_parallel.sync import Sync
from minitrain.ranks import collectives
from minitrain.ranks import torch_private as private
from minitrain.ranks.checks import require_one_of
from minitrain.ranks.collectives import Handle


class ShardedParameter(nn.Parameter):
    """A parameter that is not gathered: it has a shape and a gradient, and no numbers to compute with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        field = getattr(getattr(func, "__self__", None), "__name__", "")  # of a property
        reads = func.__name__ == "__get__" and field in ("data", "T", "mT")
        if func.__name__ in ASKS_NO_NUMBERS and not reads:
            return super().__torch_function__(func, types, args, kwargs or {})
        name = next(x.global_name for x in private.tree_leaves((args, kwargs)) if type(x) is cls)
        cure = "call the module that owns it, name one around all uses in units=, or read it in whole()"
        raise ValueError(f"{name} is sharded, and read outside its unit: {cure}")


ASKS_NO_NUMBERS = (
    *("__get__", "__set__", "__delete__", "__hash__", "size", "dim", "numel", "element_size", "nelement"),
    *("new_empty", "new_zeros", "new_full", "is_floating_point", "is_complex", "stride", "requires_grad_"),
    *("register_hook", "register_post_accumulate_grad_hook", "empty_like", "zeros_like", "untyped_storage"),
)


class UnitBuffer(Flat):
    """A flat buffer that is whole between `start` and `free` only; else nothing reads its parameters."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        super().__init__(params, *groups)
        self.whole = self.pack(params)
        self.places = views(self.whole, params)
        self.divide()
        self.handle: Handle | None = None
        self.grads: Tensor | None = None  # of the whole, while they come in
        self.sum: Tensor | None = None  # of what came back, over the microbatches
        self.num_grads = 0  # parameters whose gradient is complete in this backward
        self.keep_gathered = False  # whoever frees it (Zero3.keep_gathered)
        self.gathered, self.kinds = False, [type(param) for param in params]
        self.free()

    def divide(self) -> None:
        """The shard gets memory of its own."""
        self.cut(self.local_shard(self.whole).clone())

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """A parameter's place in a flat buffer, in its shape."""
        return flat.narrow(0, self.start_of[param], param.numel()).view(param.shape)

    def start(self, gather: Callable) -> None:
        """Start the gather, unless it is done or in flight."""
        if not self.whole.untyped_storage().nbytes():
            self._resize(self.numel)
            self.handle = gather(self)

    def wait(self) -> None:
        """The parameters are whole."""
        self._settle()
        if not self.gathered:
            for param, place, kind in zip(self.params, self.places, self.kinds):
                param.data, param.__class__ = place, kind
            self.gathered = True

    def free(self) -> None:
        if self.keep_gathered:
            return
        self._settle()  # gathered for nothing
        for param, kind in zip(self.params, self.kinds):
            nothing = float("nan") if param.is_floating_point() else 0
            param.data = param.new_full((), nothing).expand(param.shape)
            param.__class__ = ShardedParameter if kind is nn.Parameter else kind
        self.gathered = False
        self._resize(0)

    def _settle(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def _resize(self, numel: int) -> None:
        self.whole.untyped_storage().resize_(numel * self.whole.element_size())
        collectives.announce("resized", self.whole)


class Unit:
    """A module, its buffers, and the order of units in its pass (through a stage, in a pipeline)."""

    def __init__(self, module: nn.Module):
        self.module, self.flats, self.turns = module, [], None
        self.saving: list = []  # hooks of the forwards that run


class Turns:
    """The order of units in a pass, learnt from the last forward."""

    def __init__(self, units: list[Unit]):
        self.order = units  # a guess before the first
        self.seen: list[Unit] = []  # in this forward
        self.done: set[Unit] = set()  # whose backward has begun

    def forward(self, unit: Unit) -> None:
        if unit in self.seen or self.done:  # a new pass
            self.seen, self.done = [], set()
        self.seen.append(unit)
        if len(self.seen) == len(self.order):
            self.order = list(self.seen)

    def backward(self, unit: Unit) -> None:
        if unit in self.done:  # of another microbatch, with no forward between
            self.done.clear()
        self.done.add(unit)


def elements(module: nn.Module) -> list[nn.Module]:
    """The default units: members of lists inside (ModuleList, ModuleDict, Sequential), and children beside.

    Within a list only what cannot be called is opened: a block may hold lists (experts), and is one unit."""
    lists, units = (nn.ModuleList, nn.ModuleDict, nn.Sequential), []
    for child in module.children():
        can_be_called = type(child).forward is not nn.Module.forward
        holds_lists = any(isinstance(inner, lists) for inner in child.modules())
        if not can_be_called or holds_lists and not isinstance(module, lists):
            units += elements(child)
        elif any(True for _ in child.parameters()):
            units.append(child)
    return units


def assign(model: nn.Module, modules: list[nn.Module], make_flat: Callable, key_of: Mapping) -> list[Unit]:
    """Units, the model first, with a buffer for parameters that the same units use, of equal keys."""
    units = {module: Unit(module) for module in [model, *modules]}
    users: dict[nn.Parameter, dict[Unit, None]] = {}  # the units that use a parameter, by whatever name

    def visit(module: nn.Module, unit: Unit) -> None:
        unit = units.get(module, unit)
        for param in module.parameters(recurse=False):
            users.setdefault(param, {})[unit] = None
        for child in module.children():
            visit(child, unit)

    visit(model, units[model])
    alike = grouped(users, lambda param: (tuple(users[param]), param.requires_grad, key_of[param]))
    for (users_of_all, _, key), params in alike.items():
        flat = make_flat(params, key.groups)
        for unit in users_of_all:
            unit.flats.append(flat)
    if empty := [type(module).__name__ for module in modules if not units[module].flats]:
        raise ValueError(f"unit {empty[0]} has no parameters of its own; leave it out")
    return [unit for unit in units.values() if unit.flats]


# The states of a buffer's parameters, and what moves it from one to the next:
#   sharded      a slice on each rank; whoever reads a parameter gets an error (ShardedParameter)
#      _before_forward, _before_backward of its unit, or of the unit before it in this pass (prefetch)
#   gathering    all_gather under way
#      _before_forward, _before_backward of its unit wait
#   whole        parameters are views of the gathered buffer
#      _after_forward (unless reshard=False); in backward _on_grad of the buffer's last parameter, or, where
#      that hook tells nothing (frozen parameters, a pipeline's W), _after_backward: its inputs have gradients
#   resharded    as sharded
# and of its gradients:
#   none
#      _on_grad of its first parameter makes a whole buffer of zeros
#   accumulated  over parameters, and with accumulate="keep" over microbatches
#      _on_grad of its last parameter (in a pipeline `on_microbatch_grads` or `on_step_grads`): _send
#   scattering   reduce_scatter under way, one buffer at a time
#      the next _send, or finish: _settle
#   summed       this rank's slice, over ranks and microbatches; finish makes it shard.grad


class Zero3(Sync):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 3
    groups: tuple = ()  # over whose ranks a gradient is a sum, if they are more than one
    sums_are_final = True  # what is scattered needs no more sums once per step

    def __init__(
        self, model, group, make_optimizer, units=None, *, reshard=True, prefetch=True, accumulate="scatter"
    ):
        require_one_of(("scatter", "keep"), accumulate=accumulate)
        if found := [n for n, one in model.named_modules() if type(one).__name__ == "OptimizedModule"]:
            what = f"{found[0] or 'the model'} was compiled, which swallows the hooks in which ZeRO-3 gathers"
            raise ValueError(f"{what}: compile functions inside of units, or take another stage")
        self.group, self.reshard, self.prefetch, self.keep = group, reshard, prefetch, accumulate == "keep"
        super().__init__(model, self.groups or (group,), make_optimizer)
        modules = list(elements(model) if units is None else units)
        self.units = assign(model, modules, self.make_flat, self.key_of)
        self.called: set[Unit] = set()  # in this step
        self.set_shards(dict.fromkeys(flat for unit in self.units for flat in unit.flats))
        self.flat_of = {param: flat for flat in self.shards for param in flat.params}
        self.flat_at = {private.storage_id(flat.whole.untyped_storage()): flat for flat in self.shards}
        self._sent: tuple | None = None  # a buffer, its handle, and whether no later microbatch adds to it
        for part in self.parts:
            flats = {self.flat_of[param] for param in part}
            units = [unit for unit in self.units if unit.turns is None and not flats.isdisjoint(unit.flats)]
            turns = Turns(units)
            for unit in units:
                unit.turns = turns
        for unit in self.units:
            # before hooks of the module's own, which may read its weights (weight_norm), and after them
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit), always_call=True)
        for param in self.trainable:
            param.register_post_accumulate_grad_hook(partial(self._on_grad, self.flat_of[param]))

    # ---- how parameters are cut and sent: what hybrid sharding and ZeRO++ replace

    def make_flat(self, params: list[nn.Parameter], groups: tuple[ProcessGroup, ...]) -> UnitBuffer:
        return UnitBuffer(params, *groups)

    def gather(self, flat: UnitBuffer) -> Handle:
        """Start to fill flat.whole from everyone's shards."""
        return collectives.all_gather(flat.shard.detach(), flat.groups[0], out=flat.whole, async_op=True)

    def scatter(self, flat: UnitBuffer, grads: Tensor) -> Handle:
        """Start to add up everyone's whole gradient; the result is this rank's slice."""
        return collectives.reduce_scatter(grads, flat.groups[0], async_op=True)

    def complete(self, flat: UnitBuffer) -> Tensor:
        """The shard's gradient from the sum of what came back: here it is that."""
        return flat.sum

    # ---- parameters

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        if not private.in_backward():  # else a recomputation: what it needs is whole
            unit.turns.forward(unit)
            self.called.add(unit)
            inputs = differentiable(args)
            if inputs and (self.driven or any(not flat.shard.requires_grad for flat in unit.flats)):
                left = [None] * len(inputs)
                for leaf in inputs:
                    leaf.register_hook(lambda grad: self._after_backward(unit, left))
        self._make_whole(unit)
        unit.saving.append(saved_weights(self))
        unit.saving[-1].__enter__()

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output) -> None:
        if unit.saving:  # else gathering failed
            unit.saving.pop().__exit__()
        if private.in_backward():
            return
        results = differentiable(output)
        for result in results:  # a node's hooks run after its tensor's: free one unit, then gather the next
            # A write in place to a view gives the view another node, and keeps that of the tensor it views.
            made = next(x for x in (private.base_of(result), result) if x is not None and x.requires_grad)
            hook = made.register_hook if made.is_leaf else made.grad_fn.register_prehook
            hook(lambda grads: self._before_backward(unit))
        if self.reshard or not results:
            for flat in unit.flats:
                flat.free()

    def _before_backward(self, unit: Unit) -> None:
        unit.turns.backward(unit)
        self._make_whole(unit)

    def _make_whole(self, unit: Unit) -> None:
        """Gather what the unit needs, and start to gather the next unit."""
        for flat in unit.flats:
            flat.start(self.gather)
        for flat in unit.flats:
            flat.wait()
        order = unit.turns.order
        position = order.index(unit) + (-1 if private.in_backward() else 1)
        if self.prefetch and 0 <= position < len(order) and order[position] not in unit.turns.done:
            for flat in order[position].flats:
                flat.start(self.gather)

    def _after_backward(self, unit: Unit, left: list) -> None:
        """The gradient of one of a unit's inputs is there; with the last of them the unit is done."""
        left.pop()
        for flat in unit.flats if not left else ():
            if self.driven or not flat.shard.requires_grad:
                flat.free()

    # ---- gradients

    def _on_grad(self, flat: UnitBuffer, param: nn.Parameter) -> None:
        """A parameter's gradient is complete for this backward; with the last of a buffer it can be sent."""
        if param.grad is None:  # a pipeline's W makes it
            return
        if flat.grads is None:
            if not any(flat in unit.flats for unit in self.called):
                unit = f"the unit of {self.names[flat.params[0]]}"
                raise ValueError(f"{unit} never ran forward: call it as a module, or leave it out of units")
            flat.grads = collectives.announce("buffer", param.new_zeros(flat.numel, dtype=param.grad_dtype))
        flat.view(flat.grads, param).add_(param.grad)
        param.grad = None
        if self.driven:
            return
        flat.num_grads += 1
        if flat.num_grads == len(flat.params):
            flat.num_grads = 0
            flat.free()  # every operator that used these parameters has been differentiated
            if self.enabled or not self.keep:
                self._send(flat)

    def on_microbatch_grads(self, params: Iterable[nn.Parameter]) -> None:
        """Called by a pipeline: free the stage, send its gradients."""
        for flat in dict.fromkeys(self.flat_of[param] for param in reversed(list(params))):
            for param in flat.params:
                self._on_grad(flat, param)  # made by W, which no hook sees
            flat.free()
            if flat.grads is not None and not self.keep and not flat.keep_gathered:
                self._send(flat)

    def keep_gathered(self, params: Iterable[nn.Parameter], keep: bool) -> None:
        """Called by a pipeline: what is whole remains so, and gradients add up in it, until called again."""
        for flat in dict.fromkeys(self.flat_of[param] for param in params):
            flat.keep_gathered = keep

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None:
        for flat in dict.fromkeys(self.flat_of[param] for param in params):
            if flat.grads is not None:
                self._send(flat)

    def gathered_buffers(self) -> list[Tensor]:
        return [flat.whole for flat in self.shards]

    def _send(self, flat: UnitBuffer) -> None:
        """Scatter a buffer of gradients in the background; one at a time is under way."""
        self._settle()
        grads, flat.grads = flat.grads, None
        is_last = self.sums_are_final and self.enabled and not self.driven
        self._sent = flat, self.scatter(flat, grads), is_last

    def _settle(self) -> None:
        """Wait for the gradients under way and add their sum to the shard's."""
        if self._sent is not None:
            (flat, handle, is_last), self._sent = self._sent, None
            grad = handle.wait()
            flat.sum = grad if flat.sum is None else flat.sum.add_(grad)
            if is_last and self.finalizes_early(flat):
                self._finalize_sum(flat)

    def _finalize_sum(self, flat: UnitBuffer) -> None:
        grad, flat.sum = self.complete(flat), None
        self.finalize(flat, grad)

    def finish(self) -> None:
        """Every shard has its gradient, summed over ranks and microbatches; nothing is whole any more."""
        self._settle()
        self.called.clear()
        for flat in self.shards:
            flat.free()
        rest = [flat for flat in self.shards if flat.shard.requires_grad and flat not in self.finalized]
        missing = [flat for flat in rest if flat.sum is None or flat.num_grads or flat.grads is not None]
        if missing:
            raise self.missing_gradients(param for flat in missing for param in flat.params)
        for flat in rest:
            self._finalize_sum(flat)
        self.on_finish()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model's parameters can be read: `with zero.whole(): print(model.head.weight)`."""
        for flat in self.shards:
            flat.start(self.gather)
            flat.wait()
        try:
            with saved_weights(self):
                yield
        finally:
            for flat in self.shards:
                flat.free()


def saved_weights(zero: Zero3) -> saved_tensors_hooks:
    """While a unit runs forward, autograd saves of a gathered weight where it is, not its memory: whichever
    operator asks for it in backward finds it gathered, though the unit's output was never used."""
    outer = private.saved_hooks()

    def pack(tensor: Tensor):
        flat = zero.flat_at.get(private.storage_id(tensor.untyped_storage()))
        if flat is not None and tensor.dtype == flat.whole.dtype:
            return flat, (tensor.shape, tensor.stride(), tensor.storage_offset())
        return None, outer[0](tensor) if outer else (tensor, private.version_of(tensor))

    def unpack(packed) -> Tensor:
        flat, saved = packed
        if flat is not None:
            if not flat.gathered:
                flat.start(zero.gather)
                flat.wait()
            return flat.whole.as_strided(*saved)
        if outer:
            return outer[1](saved)
        tensor, version = saved
        if private.version_of(tensor) != version:  # with hooks torch does not look
            raise ValueError(f"a tensor {list(tensor.shape)} that backward needs was written to in place")
        return tensor

    return saved_tensors_hooks(pack, unpack)


def differentiable(tree) -> list[Tensor]:
    """The tensors in nested arguments or results that autograd follows."""
    return [leaf for leaf in private.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
