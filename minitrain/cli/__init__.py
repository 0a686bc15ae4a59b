"""The command line, one command a file.

main                the `minitrain` command
train_command  sample_command  tokenize_command  plan_command  replay_command  checkpoint_command
lift_command
lift                what lift_command writes: any class or function as one file over torch alone
"""
