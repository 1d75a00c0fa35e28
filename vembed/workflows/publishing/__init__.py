"""The card of a model that leaves this machine, made of the records of its run and of what its owner says.

In: the folder of a run or of a model. Out: the files beside a written model. Not here: how an encoder is written
(models), how a card reads (evaluation/card), and the way to the hub (plugins/push).
"""
