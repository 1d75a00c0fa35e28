"""The proof of benchmarks/: its rows, its time, and what it makes of a step that fails; slow: all of it on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

STEPS = """
import os, time
from proof_rows import Finding, Skipped

def good(setting):
    yield Finding("measured", {"peak_bytes": 3 << 29, "tokens/s": 123456})
    yield Finding("true", {"error": 1e-12}, held=True)
    yield Finding("impossible", {}, why_not="no | such kernel")

def bad(setting):
    yield Finding("before", {}, held=True)
    raise RuntimeError("no kernel\\nand more")

def wrong(setting):
    yield Finding("untrue", {"error": 0.5}, held=False)

def unable(setting):
    raise Skipped("no GPU")

def bare(setting):
    import a_package_that_nobody_has

def moved(setting):
    import vembed.no_such_room

def dies(setting):
    yield Finding("before", {}, held=True)
    os._exit(9)

def hangs(setting):
    yield Finding("before", {}, held=True)
    time.sleep(600)
"""


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "proof_cases.py").write_text(STEPS)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(tmp_path))
    import gpu_proof

    return gpu_proof


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]


def states(rows: list[dict[str, Any]]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row["state"])
    return found


def run_steps(proof: Any, folder: Path, names: str, *, seconds: float) -> int:
    import proof_cases

    report = proof.Report(folder, "Proof")
    steps = [proof.Step(name, getattr(proof_cases, name), 5) for name in names.split()]
    proof.prove(steps, report, "cpu", time.monotonic() + seconds)
    code: int = report.close()
    return code


def test_what_fails_is_a_row_and_the_next_step_goes_on(
    proof: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_steps(proof, tmp_path, "bad wrong unable bare moved dies good", seconds=60) == 1
    rows = rows_in(tmp_path)
    assert states(rows) == {
        "bad": ["held", "FAILED"],
        "wrong": ["FAILED"],
        "unable": ["skipped"],
        "bare": ["skipped"],
        "moved": ["FAILED"],
        "dies": ["held", "FAILED"],
        "good": ["measured", "held", "skipped"],
    }
    words = {row["step"]: row["words"] for row in rows}
    assert words["bad"] == "RuntimeError: no kernel (proof_cases.py:12)"
    assert words["bare"].startswith("a_package_that_nobody_has is not installed")
    assert words["dies"] == "its process ended with code 9"
    assert "no kernel" in capfd.readouterr().err, "the whole error is in the log"
    table = (tmp_path / "proof.md").read_text("utf-8")
    assert "| good | measured | measured | peak 1.5 GiB, tokens/s 123,456 |" in table
    assert "no / such kernel" in table
    assert table.endswith("\n3 held, 4 FAILED, 1 measured, 3 skipped\n")


@pytest.mark.slow
def test_the_time_ends_a_step_that_hangs_and_skips_the_rest(proof: Any, tmp_path: Path) -> None:
    started = time.monotonic()
    assert run_steps(proof, tmp_path, "hangs good", seconds=20) == 1
    assert time.monotonic() - started < 60
    rows = rows_in(tmp_path)
    assert states(rows) == {"hangs": ["held", "FAILED"], "good": ["skipped"]}
    assert rows[1]["words"].startswith("it wasn't done after")
    assert rows[2]["words"].startswith("no time: 0 s are left")


@pytest.mark.slow
def test_a_proof_in_which_all_held_ends_well(proof: Any, tmp_path: Path) -> None:
    assert run_steps(proof, tmp_path, "good unable", seconds=60) == 0


@pytest.mark.slow
def test_every_step_runs_on_a_cpu_or_says_why_not(proof: Any, tmp_path: Path) -> None:
    words = [sys.executable, BENCHMARKS / "gpu_proof.py", "--device", "cpu", "--minutes", "30", "--output", tmp_path]
    done = subprocess.run(words, cwd=tmp_path, check=False)
    rows = rows_in(tmp_path)
    assert [row for row in rows if row["state"] == "FAILED"] == []
    assert done.returncode == 0
    found = states(rows)
    assert list(found) == [step.name for step in proof.STEPS]
    for name in ("exactness", "out of memory", "plan", "ranks", "commands"):
        assert "held" in found[name], name
    idle = [name for name in found if set(found[name]) == {"skipped"}]
    assert idle == ["8B", *(name for name in found if "compile" in name)]
