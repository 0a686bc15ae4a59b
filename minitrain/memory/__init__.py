"""What training keeps in memory, and ways to keep less: one file an idea.

Pages  first, first_offload  each technique on 80 lines of plain torch
First  recompute           a forward keeps what it began with, and a backward runs it again; or single results
       recompute_policies  what each block keeps, in words
then   pools               memory of the device and of its host, and copies between them
       host_optimizer      ZeRO-Offload: states and updates on the host
"""
