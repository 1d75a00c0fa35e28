"""MTEB: `vembed evaluate --mteb`, and models of `vembed.load` as MTEB's library takes them.

Here: the option with the table that it prints (command.py), and the model under MTEB's interface with runs of its
tasks (model.py).
"""
