"""What chapters and exercises need around the package.

First  notebook            show a function, set numbers beside formulas, run a notebook
       atlas               every system covered, and the test that proves it
then   exercises           make, prove and grade exercise notebooks
       grading/            the judge stays outside; an answer runs in processes that give back data
beside under_limits       one model under a hard limit of memory, trained in four ways
"""
