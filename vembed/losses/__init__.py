"""Losses: tensors in, a scalar out, one loss per file.

Here: losses over the embeddings of a whole batch and what they know of its structure (positives, identities).
Not here: encoders, chunks, ranks and torch.distributed: the engine merges over those.
"""
