"""`vembed merge`: one model made of several, their weights mixed, and the mixture chosen on sets to win and to keep.

Here: the command with its options, the mixture (weights.py), and its choice with the page of it (choose.py). Training
knows nothing of it.
"""
