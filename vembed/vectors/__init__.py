"""Vectors of items: encoded, kept on disk, searched; and what training asks of vectors before its first step.

In: items and an encoder. Out: arrays (N, E), mapped from disk, and scores and rows of the nearest ones.
Not here: judgements, metrics and pages. An item is its content; where it came from is the business of data.

encode.py makes vectors, store.py keeps them under the keys of provenance.py, index.py searches them. mining.py,
teacher.py, frozen.py and the hard batches of items.py are callers of the store.
"""
