"""The model card: what a model is, how it is used and what was measured, as the README.md of its folder.

Facts in, Markdown out. Facts are read from the files that a run leaves and from the encoder, never from the
configuration's own classes; nothing here is invented, and what isn't known reads "not stated".
"""
