"""vembed for Python callers: what `vembed.train`, `vembed.load` and the other public functions are.

Everything that a user can get wrong is a `VembedError` with the message of the command line. A wrong call (an unknown
argument, an unknown side) is a `TypeError` or `ValueError`, as everywhere in Python. Not here: the command line.
"""
