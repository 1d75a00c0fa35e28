"""The step: gradients of a large batch in the memory of one chunk, equal to those of the whole batch at once.

Here: cutting a batch into chunks, the two passes, RNG replay, and the slow reference that tests compare with.
Not here: what a loss computes (losses/), what an encoder is (models/), when a weight changes (training/).
"""
