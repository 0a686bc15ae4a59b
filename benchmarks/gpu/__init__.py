"""What only a GPU can say, in ten minutes: `make gpu` on one, `make gpus` on a node with several.

__main__   the runner: each section a process of its own with a time limit, a table, build/gpu.json
steps      bf16 against the datasheet, FP8 against bf16 and torchao
beside     what runs beside a step: offloaded copies, a checkpoint; attention by tiles
node       ZeRO and DP against torch's on several GPUs; ranks that see one GPU each, as Slurm binds them
"""
