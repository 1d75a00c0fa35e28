"""Data: how files, hub sets and built-in sets become records, and records become contrastive batches.

Here: reading with file:line, validation, the held-out split, the deterministic sampler, collation, built-in sets.
Not here: tokenizers and tensors (models/), and torch.
"""
