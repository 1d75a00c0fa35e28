"""Two processes in one output folder: the second is refused by every command that writes, and the first continues."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import (
    ROOT,
    RUN,
    Site,
    assert_same_run,
    environment,
    run_here,
    run_keys,
    write_config,
)

import vembed
from vembed.entrypoints import encode, evaluate, export
from vembed.errors import ConfigError
from vembed.training.loop import TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys
from contextlib import ExitStack
from pathlib import Path
from vembed.distributed.lock import hold_output

with ExitStack() as stack:
    for beside in (False, True):
        stack.enter_context(hold_output(Path(sys.argv[1]), beside=beside))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder in which another process writes."""
    folder = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    yield folder
    other.communicate()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_is_refused_at_once_and_the_first_ends_as_if_alone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = site.keys(save_steps=2, max_steps=4, eval_steps=2)
    alone = run_keys(tmp_path / "alone", keys)
    met: list[subprocess.CompletedProcess[str]] = []
    changed: list[bool] = []
    step_of = TrainingLoop.train_step

    def step(trainer: TrainingLoop, number: int) -> Any:
        if number == 3:
            config = tmp_path / "two" / "config.yaml"
            before = contents(tmp_path / "two")
            words = [sys.executable, str(RUN), str(config)]
            met.append(subprocess.run(words, env=environment(), capture_output=True, text=True, check=False))
            changed.append(contents(tmp_path / "two") != before)
        return step_of(trainer, number)

    monkeypatch.setattr(TrainingLoop, "train_step", step)
    first = run_keys(tmp_path / "two", keys)
    assert first.code == alone.code == 0
    assert [second.returncode for second in met] == [2]
    assert all(f"process {os.getpid()} on {os.uname().nodename}" in second.stderr for second in met)
    assert changed == [False]
    assert_same_run(alone.folder, first.folder)
    assert {path.name for path in first.folder.iterdir()} == {path.name for path in alone.folder.iterdir()}


@pytest.mark.parametrize("words", [(), ("--config_override", "num_processes=2")])
def test_training_is_refused_in_one_process_and_in_several(
    held: Path, site: Site, tmp_path: Path, words: tuple[str, ...]
) -> None:
    before = contents(tmp_path)
    config = write_config(tmp_path, site.keys())
    refused = run_here(config, *words)
    assert refused.code == 2
    assert f"error: {held} is being written by process" in refused.err
    assert contents(tmp_path) == before | {config: config.read_bytes()}


def test_a_plan_is_made_but_not_written(held: Path, site: Site, tmp_path: Path) -> None:
    before = contents(held)
    planned = run_keys(tmp_path, site.keys(), "--plan")
    assert planned.code == 0
    assert f"plan.json is not written: {held} is being written by process" in planned.out
    assert contents(held) == before


@pytest.mark.parametrize("command", [encode, evaluate, export])
def test_other_commands_that_write_are_refused(
    held: Path, command: Any, bag: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(held.parent)
    data = [] if command is export else ["--data", str(corpus)]
    assert command.main([str(bag), *data, "--output", str(held)], program="vembed") == 2
    assert f"{held} is being written by process" in capsys.readouterr().err
    assert contents(held.parent) == before


@pytest.mark.slow
def test_python_callers_are_refused_too(held: Path, bag: Path, corpus: Path, site: Site) -> None:
    before = contents(held)
    with pytest.raises(ConfigError, match="is being written by process"):
        vembed.train(site.keys(output_dir=str(held)))
    with pytest.raises(ConfigError, match="is being written by process"):
        vembed.evaluate(bag, site.test, output=held)
    assert contents(held) == before
    with pytest.raises(ConfigError, match="is being written by process"):
        vembed.build_index(bag, corpus, held)


@pytest.mark.slow
def test_a_process_that_is_refused_has_imported_no_torch(held: Path, site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys())
    code = "import sys; from vembed.entrypoints.train import main; code = main([sys.argv[1]]); "
    code += "sys.exit(100 if 'torch' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", code, str(config)], cwd=ROOT, env=environment(), check=False)
    assert held.is_dir()
    assert done.returncode == 2
