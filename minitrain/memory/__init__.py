"""What training keeps in memory, and ways to keep less: one file an idea.

First  saved_tensors       what autograd keeps, and for whom
       recompute           a forward keeps what it began with, and a backward runs it again
       segment             what is run again, and what stands for tensors that are not kept
       dropping            single results, made again when they are asked for
       policies            what each block keeps, in words
then   chain_plan, chain   a chain of layers: what is held and run again, as a list; its interpreter
       dynamic             results dropped when memory is short, and made again when they are read (DTR)
       evictable           the tensor that lets its numbers be dropped
       split               an operator on parts of the batch, each kept, made again or swapped
       account             what a layer costs, result by result: where planners start
then   pools               memory of the device and of its host, and copies between them
       prefetch            chunks used in a known order, fetched before they are needed
       host_optimizer      ZeRO-Offload: states and updates on the host
       activations         what layers keep for their backward, on the host
       in_turn             a training step one layer after the other, forth and back
       l2l                 one layer at a time on the device
       window              STRONGHOLD: a window of layers on the device
       chunks              PatrickStar: parameters in equal chunks, whose place their gradients take
then   files               tensors in files: read ahead, written behind, checksums
       file_optimizer      ZeRO-Infinity: an optimizer whose states are there
       file_layers         layers, too, are in files, and come one by one
       tiles               a large linear as a row of small ones
beside limits              the smallest limit under which a run still ends well
"""
