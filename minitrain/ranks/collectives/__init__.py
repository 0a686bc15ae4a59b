"""The only door to torch.distributed: what ranks send each other, counted, logged, and checked on request.

First  functions           all_reduce, all_gather, ..., and the pairs that gradients flow through
       messages            send, receive, exchange, rotate
then   backends            what moves the data: gloo, NCCL, or nothing in a dry run
       transport           our algorithms over gloo's messages, and the chunk plan
       channel             what is known of one process group: numbers of calls, worker threads, handles
       arguments           what every call checks before any rank waits
beside call_log            every call: who, what, how many bytes, from which line
       checked             members of a group compare what they are about to call

This folder is one module to its users: `from minitrain import collectives`.
"""
# ruff: noqa: F401

from minitrain.ranks.collectives.arguments import channel_of, settle
from minitrain.ranks.collectives.call_log import (
    announce,
    announce_host,
    last_calls,
    log_to,
    name_file,
    observe,
    read_log,
)
from minitrain.ranks.collectives.channel import Handle
from minitrain.ranks.collectives.checked import CollectiveMismatch, set_checked
from minitrain.ranks.collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_of,
    barrier,
    broadcast,
    copy_to,
    gather_from,
    gather_to,
    members,
    reduce_from,
    reduce_scatter,
    reduce_scatter_to,
    scatter_to,
    world,
)
from minitrain.ranks.collectives.messages import exchange, receive, rotate, send
