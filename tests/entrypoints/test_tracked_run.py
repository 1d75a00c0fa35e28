"""What trackers are told of a whole run, and that none of them changes what it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Site, run_keys

from vembed.registry import TRACKERS
from vembed.training.trackers import Tracker

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs import Outcome

CALLS = (
    *("log", "log_ranks", "log_evaluation", "log_result", "log_text", "log_table", "log_file", "log_model"),
    *("log_stop", "close"),
)


def recording(told: list[tuple[str, tuple[Any, ...]]], fails_at: str = "") -> type[Tracker]:
    """Return a tracker that remembers what it is told, and fails at one kind of call."""

    def remember(name: str) -> Any:
        def call(self: Tracker, *given: Any) -> None:
            told.append((name, given))
            if name == fails_at:
                raise ConnectionError("nobody listens")

        return call

    def start(self: Tracker, *given: Any, **named: Any) -> None:
        Tracker.__init__(self, *given, **named)
        remember("start")(self, named["config"])

    own = {"__init__": start, **{name: remember(name) for name in CALLS}}
    return type("Recording", (Tracker,), {"name": "tensorboard", "advice": "plug it in", **own})


def tracked(folder: Path, site: Site, tracker: type[Tracker], monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Outcome:
    monkeypatch.setitem(TRACKERS._entries, "tensorboard", tracker)
    folder.mkdir()
    return run_keys(folder, site.keys(report_to=["tensorboard"], **keys))


@pytest.fixture(scope="module")
def untracked(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_keys(tmp_path_factory.mktemp("untracked"), site.keys())


def test_a_tracker_is_told_the_plan_first_and_results_examples_files_and_model_last(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, tuple[Any, ...]]] = []
    outcome = tracked(tmp_path / "a", site, recording(told), monkeypatch, log_model=True)
    assert outcome.code == 0, outcome.err
    (_, (config,)), (_, (step, name, plan)) = told[:2]
    assert config["max_steps"] == len(outcome.rows)
    assert (step, name) == (0, "plan")
    lines = [line.strip() for line in outcome.out.splitlines()]
    assert "num_workers 0: no pictures to decode" in plan, "the tables and reasons that the screen leaves out"
    assert plan.splitlines()[0] in lines
    assert [given[0] for call, given in told if call == "log"] == [row["step"] for row in outcome.rows]
    end = [(call, *given) for call, given in told if call not in ("log", "log_ranks", "log_evaluation")][2:]
    assert [each[0] for each in end] == [
        *("log_text", "log_result", "log_table", "log_table"),
        *["log_file"] * 6,
        *("log_model", "close"),
    ]
    verdict, result, metrics, examples = (each[1:] for each in end[:4])
    assert verdict == (8, "verdict", outcome.last_line)
    assert f"{result[1]['baseline/ndcg@10']:.3f} -> {result[1]['final/ndcg@10']:.3f}" in outcome.last_line
    found = {row[2]: row[3:] for row in metrics[3]}
    assert found["ndcg@10"][:2] == [result[1]["baseline/ndcg@10"], result[1]["final/ndcg@10"]]
    assert examples[2][:3] == ["kind", "query id", "query"]
    assert not [name for name in examples[2] if "picture" in name]
    report = (outcome.folder / "report" / "report.md").read_text()
    assert all(str(row[2]).split()[0] in report for row in examples[3])
    files = [each[1].relative_to(outcome.folder).as_posix() for each in end if each[0] == "log_file"]
    assert files[:2] == ["report/report.html", "report/report.json"]
    assert end[-2][1] == outcome.folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails_at",
    ["log_table", *(pytest.param(name, marks=pytest.mark.slow) for name in ("start", "log_text", "log", "close"))],
)
def test_a_tracker_that_fails_anywhere_is_told_once_with_advice_and_the_weights_stay_the_same(
    site: Site, untracked: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    told: list[tuple[str, tuple[Any, ...]]] = []
    outcome = tracked(tmp_path / "a", site, recording(told, fails_at), monkeypatch)
    assert outcome.code == 0
    assert untracked.last_line in outcome.out
    assert outcome.out.count("nobody listens") == 1
    assert (
        "Tracker tensorboard failed and is switched off; training continues and metrics.jsonl has every" in outcome.out
    )
    assert ("(plug it in): ConnectionError: nobody listens" in outcome.out) == (fails_at != "start")
    assert [call for call, _ in told][-1] == fails_at
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (outcome.folder, untracked.folder)]
    assert weights[0] == weights[1]


def test_an_error_that_ends_a_run_is_told_before_the_trackers_are_closed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, tuple[Any, ...]]] = []
    outcome = tracked(tmp_path / "a", site, recording(told), monkeypatch, learning_rate=1e30, max_grad_norm=0.0)
    assert outcome.code != 0
    assert [call for call, _ in told][-2:] == ["log_stop", "close"]
    assert type(told[-2][1][0]).__name__ == "NonFiniteError"
