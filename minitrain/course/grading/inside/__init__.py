"""What runs where an answer runs. It imports nothing of minitrain, so none of it is there to be found.

First  server     forks ranks from a process that has torch loaded
       rank       one run of an answer, from its cells to the data it returns
then   wire       the process group of a rank: every message passes through the judge
       confine    what a rank gives up before the first line of an answer runs
       frames     data that crosses, both ways
"""
