"""Losses: tensors in, a scalar out, one loss per file.

Here: losses over the embeddings of a whole batch and what they know of its structure (positives, identities).
Not here: encoders, chunks, ranks and torch.distributed: the engine merges over those.
"""

# Here, as the keys of losses import no torch, and the losses no pydantic.
MIN_LOGIT_SCALE = 1.0
"""Lower bound of a learned logit scale: a temperature over 1 flattens cosine similarities to nothing."""

MAX_LOGIT_SCALE = 100.0
"""Upper bound of a learned logit scale, as in CLIP: below a temperature of 0.01 training diverges."""
