"""Callbacks of a run: they hear it, stop it, set its rate, survive a resume, and may fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vembed
from vembed.errors import PreemptedError
from vembed.training.saving import RunCheckpoints, RunState

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.slow]

WORDS = ("red", "blue", "green", "white", "black", "fox", "tree", "car")
ROWS = [{"query": f"a {one} {two}", "positive": f"{one[::-1]} {two[::-1]}"} for one in WORDS for two in WORDS]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": "builtin:ngram-bag", "data": ROWS[:48], "val_data": ROWS[48:], "output_dir": tmp_path / "out",
        "batch_size": 16, "max_steps": 6, "learning_rate": 1e-2, "scheduler_type": "constant", "warmup_ratio": 0.0,
        "eval_strategy": "steps", "eval_steps": 2, "bm25": False, "report_to": "none",
    }  # fmt: skip


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["learning_rate"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_heard_from_the_first_evaluation_to_the_result(keys: dict[str, Any], tmp_path: Path) -> None:
    heard: list[Any] = []
    result = vembed.train(**keys, callbacks=[heard.append])
    kinds = [(type(event).__name__, getattr(event, "step", None)) for event in heard]
    assert kinds[:2] == [("EvaluationEvent", 0), ("StepEvent", 1)]
    assert [step for kind, step in kinds if kind == "StepEvent"] == [1, 2, 3, 4, 5, 6]
    assert [step for kind, step in kinds if kind == "EvaluationEvent"] == [0, 2, 4, 6]
    assert ("SaveEvent", 6) in kinds
    assert all(event.folder.is_dir() for event in heard if isinstance(event, vembed.SaveEvent) and event.step == 6)
    assert isinstance(heard[-1], vembed.EndEvent)
    assert heard[-1].result.verdict == result.verdict
    last = next(event for event in reversed(heard) if isinstance(event, vembed.EvaluationEvent))
    assert [step for step, _ in last.history] == [0, 2, 4, 6]


def test_a_decision_holds_after_a_failure_and_the_resume_repeats_the_run_that_had_none(
    keys: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vembed")

    def halve(event: object) -> object:
        if isinstance(event, vembed.StepEvent) and event.step == 2:
            return vembed.LearningRate(event.learning_rate / 2)
        return vembed.Stop("reached step 5") if isinstance(event, vembed.StepEvent) and event.step == 5 else None

    class Fails:
        def on_step(self, event: vembed.StepEvent) -> None:
            if event.step == 3:
                raise KeyError("a mistake of mine")

    vembed.train(**keys, callbacks=[halve])
    assert rates(tmp_path / "out") == [1e-2, 1e-2, 5e-3, 5e-3, 5e-3], (
        "the rate is set from step 3, and step 6 is not done"
    )
    assert "stopped at step 5 by a callback: reached step 5" in caplog.text
    again = keys | {"output_dir": tmp_path / "again"}
    with pytest.raises(KeyError, match="a mistake of mine") as failed:
        vembed.train(**again, callbacks=[halve, Fails()])
    assert "the run is saved at step 3" in failed.value.__notes__[0]
    vembed.train(**again, callbacks=[halve])
    assert rates(tmp_path / "again") == rates(tmp_path / "out")
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]
    heard: list[Any] = []
    vembed.train(**again, callbacks=[heard.append])
    assert len(rates(tmp_path / "again")) == 5, "a run that a callback ended stays ended"
    assert [type(event).__name__ for event in heard] == ["EndEvent"], "its last checkpoint is no news"


def test_the_last_step_of_a_run_that_a_callback_ends_is_evaluated(keys: dict[str, Any]) -> None:
    heard: list[Any] = []

    def stop(event: object) -> object:
        heard.append(event)
        return vembed.Stop("enough") if isinstance(event, vembed.StepEvent) and event.step == 3 else None

    vembed.train(**keys, callbacks=[stop])
    evaluated = [event.step for event in heard if isinstance(event, vembed.EvaluationEvent)]
    assert evaluated == [0, 2, 3]


def test_a_failure_whose_checkpoint_the_disk_refused_does_not_promise_it(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: object) -> None:
        if isinstance(event, vembed.StepEvent):
            raise KeyError("a mistake of mine")

    monkeypatch.setattr(RunCheckpoints, "save", lambda *_, **__: None)
    with pytest.raises(KeyError) as failed:
        vembed.train(**keys, callbacks=[fail])
    assert "the disk refused the checkpoint of step 1" in failed.value.__notes__[0]


def test_a_failure_in_the_save_that_a_signal_causes_is_told(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def on_step(self, event: vembed.StepEvent) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def on_save(self, event: vembed.SaveEvent) -> None:
            raise KeyError("a mistake of mine")

    with pytest.raises(PreemptedError, match="stopped by SIGTERM"):
        vembed.train(**keys | {"save_strategy": "no"}, callbacks=[Fails()])
    assert "a callback failed before the run stopped" in caplog.text
    assert "a mistake of mine" in caplog.text


@pytest.mark.parametrize(("stops_at", "told"), [(2, True), (6, False)])
def test_the_checkpoint_of_the_step_that_ends_a_run_leaves_room_for_the_model(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stops_at: int, told: bool
) -> None:
    caplog.set_level("INFO", "vembed")
    saved: list[tuple[int, bool]] = []
    save = RunCheckpoints.save

    def recorded(self: RunCheckpoints, state: RunState, *, best: bool, is_last: bool = False) -> Path | None:
        saved.append((state.step, is_last))
        return save(self, state, best=best, is_last=is_last)

    def stop(event: object) -> object:
        return vembed.Stop("enough") if isinstance(event, vembed.StepEvent) and event.step == stops_at else None

    monkeypatch.setattr(RunCheckpoints, "save", recorded)
    vembed.train(**keys | {"save_steps": 2}, callbacks=[stop])
    assert saved == [(step, step == stops_at) for step in range(2, stops_at + 1, 2)]
    assert ("stopped at step" in caplog.text) is told, "at the last step nothing was left out"


def test_the_early_stopping_of_the_documentation(keys: dict[str, Any], tmp_path: Path) -> None:
    class StopsAt:
        def __init__(self, target: float) -> None:
            self.target = target

        def on_evaluation(self, event: vembed.EvaluationEvent) -> vembed.Stop | None:
            reached = event.metrics["ndcg@10"] >= self.target
            return vembed.Stop(f"ndcg@10 reached {self.target}") if reached else None

    vembed.train(**keys, callbacks=[StopsAt(0.0)])
    assert not (tmp_path / "out/metrics.jsonl").exists() or rates(tmp_path / "out") == []
    assert (tmp_path / "out/model").is_dir()


def test_processes_of_a_script_train_together_on_rows_in_memory_and_ask_one_of_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, vembed\n"
        f"rows = {ROWS!r}\n"
        "calls = []\n"
        "def decide(event):\n"
        "    calls.append(event)\n"
        "    if isinstance(event, vembed.StepEvent):\n"
        "        return vembed.LearningRate(5e-3) if event.step == 1 else vembed.Stop('two')\n"
        "result = vembed.train(model='builtin:ngram-bag', data=iter(rows[:48]), test_data=rows[48:],\n"
        "    output_dir='out', batch_size=8, max_steps=4, learning_rate=1e-2, warmup_ratio=0.0, bm25=False,\n"
        "    report_to='none', eval_strategy='no', callbacks=[decide])\n"
        "open(os.environ['RANK'], 'w').write(f'{len(calls)} {result.verdict.word}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    assert rates(tmp_path / "out") == [1e-2, 5e-3]
    assert len(list((tmp_path / "out/rows").iterdir())) == 2
    first, second = ((tmp_path / rank).read_text().split(maxsplit=1) for rank in ("0", "1"))
    assert int(first[0]) > 2
    assert second == ["0", first[1]]
