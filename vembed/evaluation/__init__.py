"""Retrieval evaluation: encode, search with FAISS, score with trec_eval, compare, and report.

Here: tasks (queries, corpus, relevance judgements), the search index, metrics, significance, and the report.
Not here: how a text becomes a vector (models/), when to evaluate (training/).
"""
