"""Experts, as further systems place and move them.

two_level     dispatch and all-to-all over nodes: what crosses between them crosses once
move_experts  experts to the tokens, and their gradients home (Janus); which of these a layer does
balance       busy experts on several ranks: copies, replicas, one layout for many plans
topology      a balance loss that knows which links are fast
overlapped_experts  some rows travel while experts work on others, or on another microbatch
"""
