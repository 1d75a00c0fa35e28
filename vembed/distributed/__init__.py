"""Processes and devices: the only room that imports accelerate.

Here: which process this is and who launched it, launching several, their collectives, what shards a model, who is
missing or failed first, one policy for number formats.
Not here: which strategy is chosen (plan/), what is computed (gradcache/).
"""
