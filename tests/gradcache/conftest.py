"""Fixtures of the engine's tests."""

from typing import Any

import pytest
from engine_cases import make_case


@pytest.fixture
def case_maker() -> Any:
    return make_case
