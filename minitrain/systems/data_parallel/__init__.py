"""Data parallelism as further systems do it.

accumulation (and local updates), negotiated (and broadcast), parameter_server
zeropp (and its collectives), scaled (tensors in 8 and 16 bits with scales), dear (an all-reduce in halves)
compressed (gradients in few bytes, with error feedback, or as vectors), loss_by_bytes (what that costs)
"""
