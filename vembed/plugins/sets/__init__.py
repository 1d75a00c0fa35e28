"""Published data sets in the form that they are published in, one file each: `sop:FOLDER`.

A set is a file with two functions, which return a split as records and as a retrieval task, and a `Preset` with both
(vembed/data/presets.py). It is imported when its name is first used.
"""
