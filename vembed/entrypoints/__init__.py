"""Commands: one file each. They parse arguments, call one function, and turn errors into exit codes.

Not here: anything that a Python caller would need too.
"""
