"""One model made of several: their weights mixed, and the mixture chosen on sets that it is to win and to keep.

Imported by the commands; training knows nothing of it.
"""
