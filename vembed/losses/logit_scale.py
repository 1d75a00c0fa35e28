"""Bounds of a learned logit scale, for the keys, which import no torch, and the losses, which import no pydantic."""

MIN_LOGIT_SCALE = 1.0
"""Lower bound of a learned logit scale: a temperature over 1 flattens cosine similarities to nothing."""

MAX_LOGIT_SCALE = 100.0
"""Upper bound of a learned logit scale, as in CLIP: below a temperature of 0.01 training diverges."""
