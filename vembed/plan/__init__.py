"""The plan: every decision that `auto` left open, made once from sizes and bytes, with its reasons.

Here: what the machine has, how many bytes a step takes, which chunk budget and precision follow, and the text of it.
Not here: torch, models and data; their numbers come in as plain values.
"""
