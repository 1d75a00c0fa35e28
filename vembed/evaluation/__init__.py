"""Retrieval evaluation: score rankings with trec_eval, compare, and report.

Here: tasks (queries, corpus, relevance judgements), metrics, significance, and the report.
Not here: how items become vectors and are searched (vectors/), when to evaluate (training/).
"""
