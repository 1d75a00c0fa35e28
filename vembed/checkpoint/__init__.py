"""Checkpoints: written so that a kill at any moment leaves a whole one, and read back only when every byte is right.

Here: the format on disk, whole tensors and those that processes hold together, the manager (atomic save, retention,
newest valid), how processes agree on one outcome, optimizer state as named tensors, one file from many shards, and the
comparison of the stamps of two runs. Not here: when to save and what a difference means (training/), and no pickle.
"""
