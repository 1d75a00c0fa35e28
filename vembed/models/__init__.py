"""Encoders: items become features on the CPU, and features become embeddings on a device.

In: the keys of a model (`ModelKeys`) and items: texts, pictures, or both. Out: embeddings (R, E), or several vectors
for each item (V, E), at least float32; and folders that the model's own library loads.

To be read in this order: `encoder` (the contract), `load` (from keys to an encoder), `text` (the encoder that most
models are), `adapters` (the part that trains), `profile` (a model's size before it exists), `export` (its folders).

Not here: chunks, losses, ranks, runs and pages, and where vectors are kept.
"""
