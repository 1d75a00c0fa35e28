"""Contracts for plugins: the promises that every part of ours is held to, as classes of tests to derive from.

An author of a data format derives from `vembed.testing.formats.FormatContract`, says how a file is written, and has the
tests of every format of ours, in seconds. Needs pytest (`pip install 'vembed[test]'`); no other room imports this one.
"""

import pytest

# Its assertions show their values, though it is no test module.
pytest.register_assert_rewrite("vembed.testing.formats")
