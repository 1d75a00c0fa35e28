"""Contracts for plugins: the promises that every part of ours is held to, as classes of tests to derive from.

An author of an encoder derives from `vembed.testing.encoders.EncoderContract`, names a tiny model, and has the tests of
every encoder of ours, in seconds. Needs pytest (`pip install 'vembed[test]'`); no other room imports this one.
"""

import pytest

# Its assertions show their values, though it is no test module.
pytest.register_assert_rewrite("vembed.testing.encoders")
