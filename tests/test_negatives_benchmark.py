"""The benchmark of negatives: what it plants, in which rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return import_module


def test_a_larger_share_of_planted_answers_holds_a_smaller_one(benchmark: Any) -> None:
    def planted(share: float) -> set[tuple[int, int]]:
        rows = [({"negatives": ["mined", "mined"]}, {"negatives": ["given", "given"]}) for _ in range(50)]
        found = benchmark("negatives")._planted(rows, share)
        return {(n, k) for n, row in enumerate(found) for k in (0, 1) if row["negatives"][k] == "given"}

    assert len(planted(0.1)) == 10
    assert len(planted(0.3)) == 30
    assert planted(0.1) < planted(0.3)
