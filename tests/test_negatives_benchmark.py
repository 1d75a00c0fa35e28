"""The benchmark of negatives: what it plants, and p-values corrected for how many they are."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return import_module


def test_holm_gives_the_numbers_of_a_worked_example(benchmark: Any) -> None:
    assert benchmark("paired_runs").holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_a_larger_share_of_planted_answers_holds_a_smaller_one(benchmark: Any) -> None:
    def planted(share: float) -> set[tuple[int, int]]:
        rows = [({"negatives": ["mined", "mined"]}, {"negatives": ["given", "given"]}) for _ in range(50)]
        found = benchmark("negatives")._planted(rows, share)
        return {(n, k) for n, row in enumerate(found) for k in (0, 1) if row["negatives"][k] == "given"}

    assert len(planted(0.1)) == 10
    assert len(planted(0.3)) == 30
    assert planted(0.1) < planted(0.3)
