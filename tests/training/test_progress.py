"""What a run says while it trains: columns, the time left, a word in a long step, the total, the next commands."""

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from kit.runs import write_rows

from vembed.distributed.ranks import Ranks
from vembed.evaluation.next_steps import next_commands
from vembed.gradcache.stopwatch import Stopwatch
from vembed.plan.batch import Steps
from vembed.text import show_duration
from vembed.training import progress
from vembed.training.loop import TrainingLoop
from vembed.training.output import OutputFolder
from vembed.training.progress import (
    SAME_SPEED,
    Heartbeat,
    RunClock,
    evaluation_seconds,
    measured_step_seconds,
    step_line,
)

if TYPE_CHECKING:
    from vembed.plan.plan import Plan

STEPS = Steps(total=1000, per_epoch=100, warmup=10, eval_every=300)
METRICS = {"epoch": 0.01, "loss": 4.05, "grad_norm": 15.53, "learning_rate": 0.0, "samples_per_second": 9.0}
KEYS: dict[str, Any] = {
    **dict.fromkeys(("test_data_path", "test_data_split", "val_data_path", "val_data_split", "image_root")),
    "data_path": "train.jsonl",
    "column_mapping": {},
    "label_kind": "auto",
    "plugins": (),
    "trust_remote_code": False,
}


def test_durations_read_as_on_a_clock() -> None:
    shown = {0.4: "0:00", 40: "0:40", 192: "3:12", 59.6: "1:00", 3725: "1:02:05"}
    assert {seconds: show_duration(seconds) for seconds in shown} == shown


def test_the_lines_of_a_run_stand_in_columns_and_all_but_the_last_tell_the_time_left() -> None:
    later = {"epoch": 10.0, "loss": 11.5, "grad_norm": 0.836, "learning_rate": 1.23e-5, "samples_per_second": 12345.6}
    first = step_line(METRICS, STEPS, 1, seconds_left=754)
    last = step_line(METRICS | later, STEPS, 1000, seconds_left=0)
    assert first == ("step    1/1000  epoch  0.0  loss  4.0500  norm 16     lr 0           9/s  12:34 left")
    for word in ("epoch", "loss", "norm", "lr", "/s"):
        assert first.index(word) == last.index(word), word
    assert last.endswith("/s")
    shorter = Steps(total=500, per_epoch=100, warmup=10, eval_every=None)
    assert len(step_line(METRICS | later, shorter, 10, seconds_left=754)) <= 82


def test_the_time_left_counts_later_steps_and_the_evaluations_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = RunClock()
    clock.add_step(60.0)
    assert clock.seconds_left(STEPS, 1) == 999 * 60, "nothing better is known"
    for _ in range(2):
        clock.add_step(2.0)
    assert clock.seconds_left(STEPS, 3) == 997 * 2, "the first step warms up"
    with clock.evaluating(comes_again=True):
        now[0] += 50
    with clock.evaluating():
        now[0] += 7
    assert clock.seconds_left(STEPS, 900) == 100 * 2 + 50, "one evaluation after the last step"
    assert clock.seconds_left(STEPS, 590) == 410 * 2 + 3 * 50, "steps 600, 900 and 1000"
    with clock.evaluating(comes_at_end=True):
        now[0] += 30
    assert clock.seconds_left(STEPS, 900) == 100 * 2 + 50 + 30, "test and guard sets, as for the untrained model"


def write_seconds(folder: Path, seconds: dict[str, float]) -> None:
    """Write how long evaluations took."""
    for name, value in seconds.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.json").write_text(json.dumps({"seconds": value}))


def test_a_run_that_goes_on_reads_how_long_its_last_evaluations_will_take(tmp_path: Path) -> None:
    write_seconds(tmp_path, {"baseline": 20, "guard-1/baseline": 5, "guard-2/baseline": 3, "step-0": 9})
    clock = RunClock()
    clock.go_on(tmp_path)
    clock.add_step(2.0)
    with clock.evaluating(comes_at_end=True):
        """Read them back, which takes no time."""
    assert clock.seconds_left(STEPS, 1000) == pytest.approx(28, abs=0.1)


@pytest.mark.parametrize("content", ['{"met', '{"metrics": {}}', '["seconds"]', '{"seconds": null}', "\xff"])
def test_an_evaluation_whose_file_is_damaged_takes_no_time_and_ends_no_run(tmp_path: Path, content: str) -> None:
    write_seconds(tmp_path, {"baseline": 20, "guard-1/baseline": 5, "step-8": 3})
    for name in ("guard-1/baseline", "step-8"):
        (tmp_path / name / "metrics.json").write_text(content, encoding="latin-1")
    assert evaluation_seconds(tmp_path) == 20
    clock = RunClock()
    clock.go_on(tmp_path)
    clock.add_step(2.0)
    assert clock.seconds_left(STEPS, 1000) == 20


def test_the_total_counts_the_whole_run_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "evaluation_seconds", lambda _: 20.0)
    clock = RunClock()
    clock.go_on(Path("evaluation"))
    clock.add_step(10.0)
    with clock.evaluating():
        now[0] += 5
    now[0] = 145.0  # ten of it the step, five the evaluation
    rows = [{"step_seconds": 80.0}, {"step_seconds": 10.0}]
    assert clock.total(rows) == ("2:25 for 2 steps: 1:30 steps, 0:25 evaluation, 0:30 start, saving and report")


def test_earlier_evaluations_count_once_each(tmp_path: Path) -> None:
    write_seconds(tmp_path, {"step-0": 2.5, "baseline": 2.5, "step-8": 3.0, "baseline-reversed": 9.0})
    assert evaluation_seconds(tmp_path) == 5.5, "a copy and a search in reverse are part of another"
    write_seconds(tmp_path, {"test-1/baseline": 4.0, "guard-2/baseline": 4.0})
    assert evaluation_seconds(tmp_path) == 13.5, "further sets count too, also where they took as long as each other"


def test_a_time_is_measured_only_in_a_run_that_was_planned_alike(tmp_path: Path) -> None:
    alike = dict.fromkeys(SAME_SPEED, 1)
    plan = cast("Plan", SimpleNamespace(to_json=lambda: {**alike, "steps": 9}))
    output = OutputFolder(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [{"step": n, "step_seconds": n} for n in (1, 2, 4)])
    assert measured_step_seconds(output, plan) is None, "nothing says how that run was planned"
    (tmp_path / "model").mkdir()
    for content, expected in ((alike, 3), (alike | {"batch_size": 64}, None), ("bent", None)):
        (tmp_path / "plan.json").write_text(json.dumps(content))
        assert measured_step_seconds(output, plan) == expected


@pytest.mark.slow
def test_only_a_step_that_takes_long_speaks_and_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FIRST_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "LONGEST_SILENCE_SECONDS", 0.4)
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.01)
    heartbeat = Heartbeat(lambda: "encoding chunk 3 of 40, about 1:20 left in this step")
    with caplog.at_level(logging.INFO, "vembed"), heartbeat.watching():
        for number in range(10):
            with heartbeat.step(number):
                time.sleep(0.05)
        assert not caplog.messages, "no step of these takes long"
        with heartbeat.step(11):
            time.sleep(1.0)
    assert caplog.messages[0] == "step 11: encoding chunk 3 of 40, about 1:20 left in this step"
    assert 1 <= len(caplog.messages) <= 3


class Reached(Exception):  # noqa: N818 - no error: the end of what a test looks at
    pass


def test_a_slow_step_waits_for_data_only_where_it_takes_a_batch() -> None:
    said: list[str] = []
    watch = Stopwatch(torch.device("cpu"))

    def batch(number: int) -> SimpleNamespace:
        said.append(loop._describe_progress())
        return SimpleNamespace(parts=(), structure=None, assignment=None, step_share=1.0)

    def step(*_: object, **__: object) -> None:
        said.append(loop._describe_progress())
        with watch.part("reduce"):
            said.append(loop._describe_progress())
        raise Reached

    run: Any = SimpleNamespace(
        engine=SimpleNamespace(passes=SimpleNamespace(running=None), stopwatch=watch, step=step),
        optimizer=SimpleNamespace(scale=SimpleNamespace(value=1.0)),
        config=SimpleNamespace(seed=0), step_batches=lambda step: range(1), ranks=Ranks(), device=torch.device("cpu"),
        state=None, checkpoint=None, encoder=None,
    )  # fmt: skip
    loop = TrainingLoop(run, cast("Any", SimpleNamespace(batch=batch)))
    with pytest.raises(Reached):
        loop.train_step(0)
    assert said == ["waiting for data", "waiting for the device", "adding gradients up over ranks"]


def test_next_commands_compare_with_the_run_on_the_same_data_that_ended_before(tmp_path: Path) -> None:
    for age, name in enumerate(("other-data", "latest", "older", "no-run")):
        report = tmp_path / name / "report" / "report.json"
        report.parent.mkdir(parents=True)
        report.touch()
        os.utime(report, (1e9 - age, 1e9 - age if name != "no-run" else 2e9))
        if name != "no-run":
            (tmp_path / name / "plan.json").touch()
        data = "other.jsonl" if name == "other-data" else KEYS["data_path"]
        (tmp_path / name / "config.yaml").write_text(f"data_path: {data}\n")
    first = next_commands(tmp_path / "mine", KEYS)[0]
    assert first == f"vembed compare {tmp_path}/latest {tmp_path}/mine --output {tmp_path}/mine-comparison"


def test_next_commands_name_the_sets_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no other run lies beside
    assert next_commands(Path("runs/a b"), KEYS) == ["vembed export 'runs/a b' --output 'runs/a b-export'"]
    shapes = KEYS | {"test_data_path": "builtin:shapes", "plugins": ("own",), "image_root": "root"}
    search = "vembed --plugins own search runs/q-index"
    assert next_commands(Path("runs/q"), shapes) == [
        "vembed --plugins own evaluate runs/q/model --data builtin:shapes --image-root root --output runs/q-evaluation",
        f"vembed --plugins own encode runs/q --data builtin:shapes --output runs/q-index && {search}",
        "vembed --plugins own export runs/q --output runs/q-export",
    ]
    (tmp_path / "corpus.jsonl").touch()
    beir = next_commands(Path("r"), KEYS | {"val_data_path": str(tmp_path), "val_data_split": "dev"})
    assert beir[0] == f"vembed evaluate r/model --data {tmp_path} --split dev --output r-evaluation"
    assert beir[1].startswith(f"vembed encode r --data {tmp_path} --output r-index && vembed search")
    rows = KEYS | {"test_data_path": "test.jsonl"}
    assert [line.split()[1] for line in next_commands(Path("r"), rows)] == ["evaluate", "export"]
    assert len(next_commands(Path("r"), rows | {"column_mapping": {"q": "query"}})) == 1, "evaluate knows no columns"
    assert next_commands(Path("r"), rows | {"trust_remote_code": True}) == []
