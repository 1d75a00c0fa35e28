"""Search: a corpus as a folder of vectors and an index, and the nearest documents of a query, in a terminal or a page.

Not here: how models are loaded, judgements, metrics.
"""
