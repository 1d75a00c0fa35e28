"""Runs side by side: how their settings and data differ, which model is better, their curves, time and memory.

In: output folders of runs, finished or not (`runs.py`).
Out: a `RunComparison` with paired tests and the queries won and lost (`compare.py`), and its page (`page.py`).
Unknown here: how runs are trained, how models are loaded, metrics and intervals, models without a run.
"""
