"""Configuration: the schema of every key, and how a file and its overrides become one checked `Config`.

Here: keys with types, defaults, bounds, docs and the rules between them (schema), reading YAML and JSON with file:line
(load), what is kept beside a run (dump, resume), the generated reference.
Not here: decisions (plan/), the command line's flags (entrypoints/), torch, numpy.
"""
