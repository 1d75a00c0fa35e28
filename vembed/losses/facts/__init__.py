"""What our own losses say of themselves, without torch, so that a configuration is checked at once.

Here: one file for each loss, with its keys. Not here: the loss itself, which stands in the file of the same name one
folder up. A plugin needs no such file: its class says all of it.
"""
