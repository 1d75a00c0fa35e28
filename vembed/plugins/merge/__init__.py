"""`vembed merge`: one model made of several, their weights mixed, and the mixture chosen on sets to win and to keep.

Here: the command with its keys, the mixture (weights.py), its choice (choose.py) and the report. Training knows nothing
of it.
"""
