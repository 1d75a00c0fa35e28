"""The facts of a machine, what they mean for a run, and whether processes compute together on it: `vembed doctor`.

Not here: the command and its words for the user's configuration (entrypoints/).
"""
