"""Trackers of hosted services: what all of them do (hosted.py), and a file for each service.

To add one, copy swanlab.py, and trackio.py for texts, tables and files too; its name stands in `TRACKERS` of
vembed/registry.py.
"""
