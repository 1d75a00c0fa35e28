"""Training: the loop, what guards it, and where everything is put together.

Here: the trainer, optimizer and schedule, guards (non-finite numbers), trackers, and build.py, the only place
that turns a plan into objects. Not here: how a step is computed (gradcache/), a checkpoint written (checkpoint/) or
retrieval measured (evaluation/).
"""
