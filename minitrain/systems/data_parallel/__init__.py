"""Data parallelism as further systems do it.

accumulation, broadcast, local_updates, negotiated, parameter_server
quantized_collectives, zeropp, scaled (tensors in 8 and 16 bits with scales)
"""
