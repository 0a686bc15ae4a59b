"""Checkpoints: nothing lost, any layout to any layout, almost no stall. Read in this order:

disk        the calls to the file system that matter after a crash, in one place
header      what a file says of itself: safetensors, and a hash of every block
format      a file per writer, written once and read in parts
store       a folder of checkpoints: begin, commit, list, verify, the newest good one
listing     what is in a folder, to print
load        fill pieces from whatever pieces were saved
snapshot    what a rank saves, copied into memory that is allocated once, a block at a time
saver       what ranks do together to save, beside training
ways        when they copy, write and wait, as papers have it
frequency   how often: a budget of stalls, and what is measured
increments  tables of which few rows change: only those, in few bits (Check-N-Run)
tiers       the newest in a hot folder, older ones in a cold one
exchange    plain safetensors, as other programs read and write them
in_memory   stores in shared memory, a share per rank; the newest step of several stores
peers       copies of shares in the memory of others, sent while the network is idle
parity      the XOR of shares instead of copies
agent       a process that owns the memory, outlives the trainer, and brings steps to disk
just_in_time  nothing until a rank fails; then the others save
"""
