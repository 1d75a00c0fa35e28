"""Data: rows become a table to train on, a judged set or documents, and a table becomes contrastive batches.

In: a path (file, folder, glob, hub id, built-in or published set), a role, the data keys, and what the loss needs.
Out: `read(path, role, keys)` gives a `RecordTable` of mapped Arrow files, a `RetrievalData` of queries, documents and
judgements, or a `Corpus` document by document, each with notes; then the split, the order of an epoch, and batches.
Promises: every row is checked before anything trains; an error names file:line, column and cure; memory doesn't grow
with the texts; what an epoch holds is a function of (seed, epoch).
Not here: torch, tokenizers and tensors (models/), the plan, pages.
"""
