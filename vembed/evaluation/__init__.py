"""Retrieval evaluation: score rankings with trec_eval, compare, and report.

Here: metrics, verdicts, what is kept of an evaluation, the benchmark, and the pages of all of them.
Not here: judged sets (data/), how items become vectors and are searched (vectors/), when to evaluate (training/).
"""
