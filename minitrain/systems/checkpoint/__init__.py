"""Checkpoints beyond a folder of files.

frequency     how often: a budget of stalls, and what is measured (CheckFreq)
increments    tables of which few rows change: only those, in few bits (Check-N-Run)
storage_tiers the newest in a hot folder, older ones in a cold one
in_memory     stores in shared memory, a share per rank; others have copies, sent while the network is idle
              (Gemini), or parity (REFT)
agent         a process that owns the memory, outlives the trainer, and brings steps to disk
just_in_time  nothing until a rank fails; then the others save
hugging_face  the same model under Hugging Face's names, and where conventions differ
"""
