"""The contract's assertions show their values, though it is no test module."""

import pytest

pytest.register_assert_rewrite("encoder_contract")
