"""Graded exercises: the judge stays outside; the answer runs in processes that get inputs and give back data.

First  book                a chapter's tasks, cells and points
       checks              what a check can ask
       judge               the side that knows what is right
then   trial, answer       one question to an answer, and the processes it runs in
       assignment          student notebooks from sources, and their proofs
beside confine, network    what an answer may touch
       frames, wire        data that crosses, in and out
"""
