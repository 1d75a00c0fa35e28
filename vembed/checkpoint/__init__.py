"""Checkpoints: written so that a kill at any moment leaves a whole one, and read back only when every byte is right.

Comes in: named tensors (whole, or shared out over processes), state and stamp as JSON. Goes out: a folder that is whole
or isn't there. format.py says what lies on disk, tensors.py writes and reads one folder, manager.py keeps the folders
of a run, optimizer_state.py names an optimizer's tensors. Not known here: models, when to save, what a difference
between two runs means (training/). Nothing is pickled.
"""
