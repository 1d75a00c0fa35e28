"""Checkpoints: written so that a kill at any moment leaves a whole one, and read back only when every byte is right.

Here: the format on disk, the manager (atomic save, retention, newest valid), optimizer state as named tensors, and the
comparison of the stamps of two runs. Not here: when to save and what a difference means (training/), and no pickle.
"""
