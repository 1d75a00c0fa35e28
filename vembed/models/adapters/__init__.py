"""What trains of an encoder: all of it, a part, or low-rank adapters beside frozen weights.

Freezing, adapters and the 4-bit loading that goes with them live here, and what a checkpoint must hold of the result.
How an encoder is built and what it computes is its own business.
"""
