"""Encoders: how an item becomes features, and features become an embedding.

Here: loading by name, families, pooling, the built-in tiny encoders, export.
Not here: chunks and losses; which prompt or chunk size a run uses is told, not read from the configuration.
"""
