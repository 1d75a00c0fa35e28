"""Trackers: where what a run tells goes while it trains.

Here: what a tracker is, their registry, metrics.jsonl (always), a file for each service, and the guard that keeps a
failing one from stopping a run.
Not here: what they are told (training/loop.py and tracking.py), and the reports of an evaluation (evaluation/).
"""
