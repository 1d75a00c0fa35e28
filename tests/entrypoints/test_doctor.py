"""The doctor's command: what it prints, for people and for programs, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from vembed.entrypoints import doctor
from vembed.errors import MachineError
from vembed.workflows.doctor import machine as machine_module
from vembed.workflows.doctor import self_test as self_test_module
from vembed.workflows.doctor.self_test import SelfTest

if TYPE_CHECKING:
    from pathlib import Path

GOOD = SelfTest(gradient_error=2e-15, loss_error=0.0, collective_error=0.0, num_chunks=(3, 6), seconds=0.1)


@pytest.fixture
def tests_give(monkeypatch: pytest.MonkeyPatch) -> dict[str, SelfTest | MachineError]:
    """Let the self tests give what the test says, without starting processes."""
    answers: dict[str, SelfTest | MachineError] = {"gloo": GOOD, "nccl": GOOD}

    def answer(*, world_size: int, backend: str) -> SelfTest:
        found = answers[backend]
        if isinstance(found, MachineError):
            raise found
        return found

    monkeypatch.setattr(self_test_module, "self_test", answer)
    return answers


def test_a_good_machine_is_shown_and_ends_with_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tests_give: dict[str, SelfTest | MachineError]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert doctor.main([], program="vembed doctor") == 0
    text = capsys.readouterr().out
    for word in ("machine", "cores", "memory", "devices", "torch", "NCCL_DEBUG", "3 + 6 encoder calls"):
        assert word in text
    assert "largest gradient error 2.0e-15" in text
    assert "hf_canary" not in text


def test_json_holds_the_same_and_nothing_else_is_printed(
    capsys: pytest.CaptureFixture[str], tests_give: dict[str, SelfTest | MachineError]
) -> None:
    assert doctor.main(["--json"], program="vembed doctor") == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"machine", "variables", "self_tests", "checks", "plan"}
    assert document["plan"] is None
    assert document["self_tests"][0]["gradient_error"] == 2e-15
    assert document["self_tests"][0]["passed"] is True
    assert document["machine"]["memory_bytes"] > 1e8
    assert document["machine"]["packages"]["torch"]


def test_a_wrong_gradient_ends_with_5_and_says_so(
    capsys: pytest.CaptureFixture[str], tests_give: dict[str, SelfTest | MachineError]
) -> None:
    tests_give["gloo"] = replace(GOOD, gradient_error=0.5)
    assert doctor.main([], program="vembed doctor") == 5
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "training would be wrong" in text


def test_processes_that_do_not_find_each_other_end_with_5_and_the_cure(
    capsys: pytest.CaptureFixture[str], tests_give: dict[str, SelfTest | MachineError]
) -> None:
    tests_give["gloo"] = MachineError("process 1 of 2 said nothing in time")
    assert doctor.main([], program="vembed doctor") == 5
    text = capsys.readouterr().out
    assert "process 1 of 2 said nothing in time" in text
    assert "GLOO_SOCKET_IFNAME=lo" in text


def test_a_missing_package_ends_with_5_though_nothing_was_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.main(["--no-self-test"], program="vembed doctor") == 0
    monkeypatch.setattr(machine_module, "REQUIRED_PACKAGES", ("torch", "no-such-package-of-ours"))
    assert doctor.main(["--no-self-test"], program="vembed doctor") == 5
    assert "pip install no-such-package-of-ours" in capsys.readouterr().out


def test_what_a_launcher_left_behind_is_found_instead_of_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert doctor.main(["--no-self-test"], program="vembed doctor") == 0
    assert "one of 2 processes and waits for the others: unset it" in capsys.readouterr().out
    assert doctor.main(["configs/quickstart.yaml"], program="vembed doctor") == 2, "a plan would wait for the other"


def test_a_broken_configuration_ends_with_2_before_anything_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("batch_sise: 3\n")
    assert doctor.main([str(config), "--no-self-test"], program="vembed doctor") == 2
    assert doctor.main(["--no-self-test", "--config_override", "batch_sise=3"], program="vembed doctor") == 2
    captured = capsys.readouterr()
    assert captured.err.count("did you mean batch_size?") == 2, "overrides alone are a configuration, too"
    assert captured.out == ""


def test_a_configuration_is_planned_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"word {number}", "positive": f"text of {number}"} for number in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["model_name=builtin:ngram-bag", "data_path=train.jsonl", "batch_size=32"]
    (tmp_path / "config.yaml").write_text("output_dir: out\n")
    arguments = ["config.yaml", "--no-self-test", "--json", "--config_override", *words]
    assert doctor.main(arguments, program="vembed doctor") == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["strategy"] == "single"
    assert plan["global_batch_size"] == 32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "train.jsonl"]


@pytest.mark.parametrize(
    ("wrong", "code", "reason"),
    [
        ("data_path=nowhere.jsonl", 3, "nowhere.jsonl doesn't exist"),
        ("model_name=all-MiniLM-L6-v2", 2, "did you mean sentence-transformers/all-MiniLM-L6-v2?"),
        ("output_dir=config.yaml/out", 5, "config.yaml is a file"),
        ("mrl_dims=[99999]", 2, "mrl_dims: 99999 is more than"),
    ],
)
def test_nothing_is_called_ready_where_the_run_would_fail(
    wrong: str,
    code: int,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"word {number}", "positive": f"text of {number}"} for number in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    right = {"model_name": "builtin:ngram-bag", "data_path": "train.jsonl", "output_dir": "out", "batch_size": "32"}
    (tmp_path / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in right.items()))
    words = ["config.yaml", "--no-self-test", "--config_override", wrong]
    assert doctor.main(words, program="vembed doctor") == code
    said = capsys.readouterr()
    assert reason in said.err
    assert "problems" not in said.out


@pytest.mark.slow
def test_the_whole_command_tests_two_real_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vembed", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (test,) = json.loads(done.stdout)["self_tests"]
    assert test["passed"]
    assert 0 < test["gradient_error"] < 1e-12
