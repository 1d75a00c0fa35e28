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
    def planted(share: float) -> set[int]:
        rows = [
            ({"negatives": ["mined"]}, {"negatives": ["given" if number < 80 else "mined"]}, {"negatives": ["given"]})
            for number in range(100)
        ]
        found = benchmark("negatives")._planted(rows, share)
        return {number for number, row in enumerate(found) if row["negatives"] == ["given"]}

    assert len(planted(0.1)) == 10
    assert len(planted(0.3)) == 30
    assert planted(0.1) < planted(0.3) < {*range(80)}, "only what the miner takes is planted"
    with pytest.raises(SystemExit, match="takes too few given negatives to plant 90%"):
        planted(0.9)
