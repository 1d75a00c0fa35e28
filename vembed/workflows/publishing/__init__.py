"""A model that leaves this machine: its card, and its way to the Hugging Face hub.

In: the folder of a run or of a model, and what its owner says. Out: the files beside a written model, or what was sent.
Not here: how an encoder is written (models) and how a card reads (evaluation/card).
"""
