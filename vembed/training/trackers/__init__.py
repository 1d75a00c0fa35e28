"""Trackers: where the numbers of a run go while it trains.

Here: what a tracker is, their registry, metrics.jsonl (always), TensorBoard, and the guard that keeps a failing tracker
from stopping a run.
Not here: which numbers there are (training/), and the reports of an evaluation (evaluation/).
"""
