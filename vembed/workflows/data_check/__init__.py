"""Find what is wrong with a data set before anything trains on it: findings, their examples, terminal and page.

Not here: reading rows (`data/`), loading models, training.
"""
