"""Plugins that come with vembed: what not every user needs, each through the doors that a user's plugin has.

Here: trackers of hosted services. Nothing imports this room: vembed/registry.py has the names, and a plugin is imported
when a configuration asks for it.
"""
