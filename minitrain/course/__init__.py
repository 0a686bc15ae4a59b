"""What chapters and exercises need around the package.

First  notebook            show a function, set numbers beside formulas, run a notebook
       atlas               every system covered, and the test that proves it
       kernels             started without a port that another program could take, interrupted in one line
       home                where chapters and exercises are: in a clone, or laid out from a wheel
then   lab                 copies of both for the reader to work in
       exercises           make, prove and grade exercise notebooks
       plot/               every picture
       grading/            the judge stays outside; an answer runs in processes that give back data
beside saved_tensors   what autograd keeps for a backward, and for whom
       fit             constants of a prediction from rows that are named beforehand
       audit               numbers that published runs print: which one does not fit the others
       race                every search for a plan on one instance, each beside all choices
       capstone            six kinds of chaos that an exercise's answers train through, on real ranks
       loopback            the kernel's own count of bytes, which the ledger is checked with
       install             PyTorch as it fits the machine, and the tested versions of all else
       pipelines           a pipeline's step beside one process, with a mistake in it or without
       sequences           attention over ranks against one process, and what it sends
       sums                answers that can be checked, for models that learn from rewards
       under_limits        one model under a hard limit of memory, trained in four ways
"""
