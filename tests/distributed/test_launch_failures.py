"""Several processes for real: started, failing in every way, and what is left of the run then."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from vembed.distributed.launch import launch

JOB = Path(__file__).with_name("launch_job.py")
ROOT = Path(__file__).parents[2]


def run(what: str, folder: Path, *, timeout_seconds: int = 600, num_processes: int = 2) -> tuple[int, float]:
    """Launch the job and return its exit code and how long it took."""
    os.environ["PYTHONPATH"] = str(ROOT)
    words = [what, str(folder), str(timeout_seconds)]
    started = time.monotonic()
    code = launch(JOB, words, num_processes=num_processes, called="python run.py", stop_seconds=30)
    return code, time.monotonic() - started


def exit_json(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "exit.json").read_text("utf-8"))
    return content


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_code_and_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run("error", tmp_path / "out")
    out, err = capfd.readouterr()
    assert code == 3
    assert {line.split(",")[0] for line in out.splitlines() if " of 2" in line} == {"rank 0 of 2", "rank 1 of 2"}
    found = exit_json(tmp_path / "out")
    assert (found["code"], found["rank"], found["message"]) == (3, 1, "rows.jsonl:3: the text is empty")
    assert found["host"]
    assert f"error: rank 1 on {found['host']}: rows.jsonl:3: the text is empty" in err
    assert "rank 0: leaves after the failure of rank 1" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_run_without_failure_leaves_no_exit_json_and_waits_for_the_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "exit.json").write_text("of an earlier attempt")
    code, _ = run("nothing", tmp_path / "out", num_processes=3)
    assert code == 0, capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["done"]


@pytest.mark.slow
def test_a_bug_on_one_rank_shows_its_traceback_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = run("bug", tmp_path / "out")
    err = capfd.readouterr().err
    assert code == 1
    assert err.count("Traceback") == 1
    assert "ZeroDivisionError: a bug" in err
    assert (exit_json(tmp_path / "out")["rank"], exit_json(tmp_path / "out")["code"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "stop", "hang"])
def test_a_rank_that_can_not_speak_is_named_by_the_others(
    tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, seconds = run(what, tmp_path / "out", timeout_seconds=6)
    err = capfd.readouterr().err
    assert code == 5, err
    found = exit_json(tmp_path / "out")
    assert (found["rank"], found["code"]) == (1, 5)
    assert f"error: rank 1 on {found['host']}: stopped answering, last seen in vembed/" in err
    if what == "hang":
        assert "last seen in vembed/entrypoints/command.py" in found["message"]
    assert seconds < 6 + 75  # torch's launcher gives a stopped process 30 s before it kills it


@pytest.mark.slow
def test_a_first_rank_that_is_killed_while_it_works_alone_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    code, seconds = run("kill alone", tmp_path / "out", timeout_seconds=600)
    found = exit_json(tmp_path / "out")
    assert (code, found["rank"], found["code"]) == (5, 0, 5)
    assert "stopped answering" in found["message"]
    assert seconds < 25, "neither the timeout nor the launcher's patience of 30 s"


@pytest.mark.slow
def test_a_first_rank_that_works_alone_for_longer_than_the_timeout_is_no_failure(tmp_path: Path) -> None:
    code, seconds = run("work alone", tmp_path / "out", timeout_seconds=6)
    assert code == 0
    assert seconds > 12


@pytest.mark.slow
def test_processes_with_other_settings_are_refused_and_both_values_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run("differ", tmp_path / "out")
    assert code == 2
    message = exit_json(tmp_path / "out")["message"]
    assert "batch_size: 16 on rank 1" in message
    assert "8 on rank 0" in message
    assert capfd.readouterr().err.count("the processes of this run differ") == 1, "all say the same: once is enough"
