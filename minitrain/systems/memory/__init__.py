"""Memory, as further systems save it.

First  chain_plan, chain   a chain of layers: what is kept and run again, as a list; its interpreter
       dtr                 results dropped when memory is short (DTR)
       split               an operator by parts of the batch (TSPLIT) or of its weight (ZeRO-Infinity's tiles)
then   window              what is used in a known order, fetched before it is needed (ZeRO-Infinity);
                           a window of layers on the device (STRONGHOLD), or one (L2L)
       chunks              PatrickStar: parameters in equal chunks, whose place their gradients take
then   activations         what layers keep for their backward, on the host (vDNN)
       files               ZeRO-Infinity: tensors in files, optimizers whose states are there, and layers
beside limits              the smallest limit under which a run still ends well
"""
