"""Graded exercises: the judge stays outside; the answer runs in processes that get inputs and give back data.

First  book                a chapter's tasks, cells and points
       answer_checks       what a check can ask
       judge               the side that knows what is right
then   trial, network      one run of an answer: what the judge sees, counts and believes
       inside              what runs where the answer does
       kit                 the collectives an answer may be given
       assignment          student notebooks from sources
"""
