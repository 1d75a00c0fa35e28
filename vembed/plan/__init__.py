"""The plan: every decision that `auto` left open, made once from sizes and bytes, with its reasons.

In: a `Config` (keys.py declares the plan's part of it), a `Machine` and its `Devices` (devices.py), a `ModelSize`
(memory.py) and a `DataSize` (problem.py). Out: a `Plan` (plan.py), and its text (text.py). On the way:

1. batch.py: queries and optimizer steps, data workers.
2. strategy.py: every way to train is weighed (cost.py: bytes, seconds; peak.py: the worst moment of a step; chunks.py:
   encoder calls); the first that fits is taken.
3. plan.py: what follows from that way: precision, packing, compilation, encoder calls of evaluations.

Unknown here: torch, models, data and the command line; their numbers come in as plain values.
"""
