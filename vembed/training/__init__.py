"""Training: from a configuration to a trained model and its verdict.

In: a `Config`. Out: a model, metrics, checkpoints and a report in the output folder. run.py puts the parts together and
is the first file to read; loop.py is what happens in each step. Not here: how a step is computed (gradcache/), a
checkpoint written (checkpoint/) or retrieval measured (evaluation/).
"""
