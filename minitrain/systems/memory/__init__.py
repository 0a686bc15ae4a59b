"""Memory, as further systems save it.

First  chain_plan, chain   a chain of layers: what is held and run again, as a list; its interpreter
       dtr, evictable      results dropped when memory is short (DTR); a tensor that lets go of its numbers
       split               an operator on parts of the batch, each kept, made again or swapped
       account             what a layer costs, result by result: where planners start
then   in_turn, l2l        a training step one layer after the other; one layer at a time on the device
       window              STRONGHOLD: a window of layers on the device
       chunks              PatrickStar: parameters in equal chunks, whose place their gradients take
then   files               tensors in files: read ahead, written behind, checksums
       file_optimizer      ZeRO-Infinity: an optimizer whose states are there
       file_layers         layers, too, are in files, and come one by one
       tiles               a large linear as a row of small ones
beside limits              the smallest limit under which a run still ends well
"""
