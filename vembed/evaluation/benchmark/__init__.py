"""The retrieval benchmark: many models on many sets, kept on disk so that a rerun does only what is new.

Here: names, keys of what was done, stored vectors, cheaper forms of the vectors, and the order of the work.
Not here: how one run is scored (evaluation/), what the leaderboard looks like (evaluation/leaderboard_page.py).
"""
