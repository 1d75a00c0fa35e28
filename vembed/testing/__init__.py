"""Contracts for plugins: the promises that every part of ours is held to, as classes of tests to derive from.

An author of an encoder derives from `vembed.testing.encoders.EncoderContract` and names a tiny model; an author of a
data format derives from `vembed.testing.formats.FormatContract` and says how a file is written. Each has the tests of
every encoder or format of ours then, in seconds. It needs pytest, and no other room imports it.
"""

import pytest

# Their assertions show values, though they are no test modules.
pytest.register_assert_rewrite("vembed.testing.encoders", "vembed.testing.formats")
