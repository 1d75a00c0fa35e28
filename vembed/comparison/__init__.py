"""Runs side by side: how their settings and data differ, which model is better, their curves, time and memory.

Here: what is read of finished and unfinished runs (runs), the whole comparison (compare), paired tests (pairs),
differences, queries won and lost (queries), drawings (charts), tables and the three files (write).
Not here: metrics and intervals (evaluation/), what runs write (training/), models on sets (evaluation/leaderboard.py).
"""
