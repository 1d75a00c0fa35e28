"""Commands that were killed once their output had its name: the same command cleans up and ends well."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit.runs import environment
from kit.warm import run_warm
from mining_cases import made_rows, written

if TYPE_CHECKING:
    from subprocess import CompletedProcess

HERE = Path(__file__).parent

COMMANDS = {
    "mined.jsonl": "mine {bag} --data {rows} --output mined.jsonl --relative-margin none",
    "index": "encode {bag} --data {corpus} --output index",
    "exported": "export {bag} --output exported",
    "merged": "merge {bag} {bag} --weights 0.5 0.5 --output merged",
}
REPORTS = {"mined.jsonl": ["mined-report"]}


@pytest.mark.parametrize(
    "name", ["mined.jsonl", "index", *(pytest.param(name, marks=pytest.mark.slow) for name in ("exported", "merged"))]
)
def test_the_same_command_finishes_what_a_kill_left(name: str, bag: Path, corpus: Path, tmp_path: Path) -> None:
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    rows = written(tmp_path / "rows.jsonl", made_rows(30))
    words = COMMANDS[name].format(bag=bag, corpus=corpus, rows=rows).split()

    def run(*before: str) -> CompletedProcess[str]:
        return run_warm([*before, *words], cwd=work, env=environment(), scratch=scratch)

    def entries() -> list[str]:
        return sorted(path.name for path in work.iterdir())

    assert run(str(HERE / "kill_behind.py"), name).returncode == -signal.SIGKILL
    left, inode = entries(), (work / name).stat().st_ino
    assert {name, *REPORTS.get(name, [])} < {*left}, "the output is whole, and something is left to clean"
    again = run("-m", "vembed")
    assert again.returncode == 0, again.stderr
    assert f"{name} is whole" in again.stdout
    assert entries() == sorted([name, *REPORTS.get(name, [])])
    assert (work / name).stat().st_ino == inode, "nothing was done twice"
    assert run("-m", "vembed").returncode == 2, "what has ended is refused as ever"
