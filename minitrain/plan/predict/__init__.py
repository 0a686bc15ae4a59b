"""How long a training step takes and what it keeps, predicted from a dry run's counts. No torch.

First  predicted_step      predict(run, work_of): seconds, their parts, MFU
       predicted_memory    states, activations, buffers, by kind
then   training_run        a run as plain values, what its software does, and the published ones
       work                what one rank does for a microbatch, layer by layer, as a dry run counted it
       rates               how fast operators, collectives and layers really are: few constants, all named
       predicted_pipeline  the longest way through a schedule, remembered by structure
"""
