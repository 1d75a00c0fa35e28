"""The keys of the configuration, a file for each section: types, defaults, meanings and the rules between them.

Nothing here reads a file or knows where a value came from.
"""
