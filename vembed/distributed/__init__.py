"""Processes and devices: the only room that imports accelerate.

Here: which device this process trains on, how many processes there are, one policy for number formats.
Not here: which strategy is chosen (plan/), what is computed (gradcache/).
"""
