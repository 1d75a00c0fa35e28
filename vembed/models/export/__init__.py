"""A model as a folder that others load: in which form, written whole or not at all, and read back to be sure.

What a run measured and how it is told to people is no part of it: a model card is a file that the caller gives.
"""
