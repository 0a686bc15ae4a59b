"""What minitrain uses of torch behind its public API: the place to look at when torch has a new version.

For torch 2.11 to 2.13, tested with 2.13 (pyproject.toml). No other names these (tests/test_architecture.py).
"""

from functools import partial
from importlib import import_module
from operator import attrgetter

import torch
from torch import _C, _ops, overrides
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch, _pytree, backend_registration

COMPILER = "torch._dynamo"  # torch.optim's first optimizer imports it, in as much time as torch itself
C10D_FILE = "distributed_c10d.py"  # torch's collectives: a rank with a frame of it in its stack waits in one

# Operators: what one reads and writes, whether it has a kernel; the dispatch modes that see it.
OpOverload = _ops.OpOverload
schema_of = attrgetter("_schema")
has_kernel = _C._dispatch_has_kernel_for_dispatch_key
num_modes = _python_dispatch._len_torch_dispatch_stack
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack  # of this thread, the outermost first
function_modes = overrides._get_current_function_mode_stack  # modes of torch functions, likewise
# Inside this there are real numbers in a dry run, and no line in an account.
outside_modes = _python_dispatch._disable_current_modes

storage_id = attrgetter("_cdata")  # of a block of memory while it is alive; fake ones have no address
grad_hooks = attrgetter("_post_accumulate_grad_hooks")  # of a parameter, in the order in which they run
saved_hooks = partial(_C._autograd._top_saved_tensors_default_hooks, True)  # (pack, unpack) now, or None
keeps_graph = _C._autograd._get_current_graph_task_keep_graph  # will this backward's graph be used again?
autograd_functions = _C._functions  # a module that cannot be imported, so that it is pickled by its name
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map  # the tensors in any nest of arguments
base_of = attrgetter("_base")  # what a tensor is a view of; else None
version_of = attrgetter("_version")  # of a tensor: how often it was written to in place
# A tensor without memory that goes through an autograd graph in the place of one that may be dropped.
wrapper_tensor = torch.Tensor._make_wrapper_subclass
# What a result of shapes depends on, and an operator that those who see every one must know.
default_device = _C._get_default_device
# Lets there be a device of this name, for fake tensors; None where torch has no such function.
python_backend = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
dispatch_keys = _C._dispatch_keys  # of a tensor: a number that says what it is to the dispatcher
DEVICE_OF = torch.ops.prim.device.default  # which device a tensor is on
# Views that their kernels for shapes do right; torch has rules of its own for them, for symbolic sizes.
VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.slice.Tensor
make_subclass = torch.Tensor._make_subclass
throw_on_data_ptr = _C._set_throw_on_mutable_data_ptr
no_dispatch = _C._DisableTorchDispatch  # while one of these lives no mode and no subclass sees an operator
plain_torch_functions = _C._disabled_torch_function_impl

# Attention kernels that also return the log of the denominator.
aten = torch.ops.aten
flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_cuda = aten._scaled_dot_product_flash_attention
flash_cuda_backward = aten._scaled_dot_product_flash_attention_backward
efficient = aten._scaled_dot_product_efficient_attention
efficient_backward = aten._scaled_dot_product_efficient_attention_backward
cudnn = aten._scaled_dot_product_cudnn_attention
cudnn_backward = aten._scaled_dot_product_cudnn_attention_backward
scaled_mm = torch._scaled_mm  # FP8 codes and scales
scaled_product = aten._scaled_mm  # the operator that it runs
fused_adamw_ = torch._fused_adamw_  # the whole update of AdamW in one kernel, in place
grouped_product = aten._grouped_mm  # what torch.nn.functional.grouped_mm runs

# Tensors without numbers, their errors, ranks without a network: imported when asked for, in half a second.
FAKE = "FakeTensor FakeTensorMode FakeCopyMode DataDependentOutputException DynamicOutputShapeException "
FAKE += "in_kernel_invocation_manager"  # inside, an operator on fake tensors runs its kernel for shapes
FOR_DRY_RUNS = dict.fromkeys(FAKE.split(), "torch._subclasses.fake_tensor")
FOR_DRY_RUNS["op_implementations_checks"] = "torch._subclasses.fake_impls"
FOR_DRY_RUNS["FakeStore"] = "torch.testing._internal.distributed.fake_pg"


def __getattr__(name: str):
    if name not in FOR_DRY_RUNS:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(FOR_DRY_RUNS[name]), name)


def count_groups_anew() -> None:
    """A group that could not be made was counted, and names of later ones would differ from other ranks'."""
    distributed_c10d._world.group_count = 0


def in_backward() -> bool:
    """Is autograd at work in this thread (so that a forward is a recomputation)?"""
    return _C._current_graph_task_id() != -1


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """Sees every operator of this thread on its way to the kernel."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operator: two seconds in every rank
