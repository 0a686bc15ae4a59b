"""The only door to torch.distributed: what ranks send each other, counted, logged, and checked on request.

First  functions           all_reduce, ..., the pairs that gradients flow through; send, rotate, ...
then   transport           what moves the data: our algorithms over gloo's messages, NCCL, or nothing
       channel             what is known of one process group: numbers, threads; what every call checks
beside call_log            every call: who, what, how many bytes, from which line; members compare theirs
       plain               the same in a few lines each, over torch.distributed alone, for `minitrain lift`

This folder is one module to its users: `from minitrain import collectives`.
"""
# ruff: noqa: F401

from minitrain.ranks.collectives.call_log import (
    CollectiveMismatch,
    announce,
    announce_host,
    last_calls,
    log_to,
    name_file,
    observe,
    read_log,
    set_checked,
)
from minitrain.ranks.collectives.channel import Handle, settle
from minitrain.ranks.collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_of,
    barrier,
    broadcast,
    channel_of,
    copy_to,
    exchange,
    gather_from,
    gather_to,
    members,
    queues_messages,
    receive,
    reduce_from,
    reduce_scatter,
    reduce_scatter_to,
    rotate,
    scatter_to,
    send,
    world,
)
