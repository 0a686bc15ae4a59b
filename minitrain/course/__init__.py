"""What chapters and exercises need around the package.

First  notebook            show a function, set numbers beside formulas, run a notebook
       atlas               every system covered, and the test that proves it
then   exercises           make, prove and grade exercise notebooks
       grading/            the judge stays outside; an answer runs in processes that give back data
beside under_limits       one model under a hard limit of memory, trained in four ways
       crash_model         every state of the disk that a power cut may leave of a save
       crashes             a disk on which its process dies; what such crashes leave; a copy that is held up
"""
