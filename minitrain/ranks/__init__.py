"""N ranks, real and dry, and their exact account: what every technique stands on.

First  launch              run a function on N ranks of this machine or of a job, or as one of thousands, dry
       collectives         the only door to torch.distributed: what ranks send to each other
       ledger              bytes, FLOPs and memory of whatever runs inside it
then   mesh                ranks as a grid, one process group per axis
       sharding            a parameter knows how it is cut
       pieces              which rectangles of which tensors a rank has
beside autograd            passes that are written by hand
       random_state        states of random number generators
       checks              what every door checks, in one line each
       process             what the functions of one process share: the only state that no argument carries
       devices             what a GPU of a generation can do, and when it has done what it was told
       events              what one rank did, in order: the account, as plain values
       tables              text tables
       torch_private       what torch does not document, in one place
"""
