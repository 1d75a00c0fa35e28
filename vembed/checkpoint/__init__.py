"""Checkpoints: written so that a kill at any moment leaves a whole one, and read back only when every byte is right.

Here: the format on disk, whole tensors and those that processes hold together, the manager (atomic save, retention,
newest valid), and optimizer state as named tensors. Not here: when to save and what a difference between two runs means
(training/), and no pickle.
"""
