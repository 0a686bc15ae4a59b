"""Checkpoints: nothing lost, any layout to any layout, almost no stall. Read in this order:

first       the technique on 80 lines of plain torch
disk        the calls to the file system that matter after a crash, in one place
format      a file per writer, a hash of every block: written once, read in parts
store       a folder of checkpoints: begin, commit, list, verify, the newest good one
load        fill pieces from whatever pieces were saved
snapshot    what a rank saves, copied into memory that is allocated once, a block at a time
saver       what ranks do together to save, beside training; when they copy, write and wait, as papers have it
"""
