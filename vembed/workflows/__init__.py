"""Jobs around training: compare runs, check data, look at the machine, mine, search, sweep, write cards.

They use a finished model, a run's folder or rows, and train only by starting `vembed train`. Training knows none of
them, and of each other sweeps alone know comparisons.
"""
