"""Runs compared: paired numbers, what isn't comparable, what is said of runs in every state, and the page of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from kit.pages import Page, assert_sound
from scipy import stats

from vembed.config.load import load_values
from vembed.config.record import dump_config
from vembed.data.run_data import content_hash
from vembed.errors import ConfigError
from vembed.evaluation.judge import compare, holm, paired_p_value
from vembed.evaluation.results import EvaluationResult, write_evaluation
from vembed.pages.text import MINUS
from vembed.training.data import load_data
from vembed.workflows.comparison.compare import compare_runs
from vembed.workflows.comparison.page import overlays, terminal_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


METRIC = "ndcg@10"


CONTENT = "a" * 64


ENVIRONMENT = {"vembed": "0.1.0", "torch": "2.15.0", "device": "the CPU"}


def values_of(seed: int, *, count: int = 40) -> list[float]:
    """Return a value for each query, between 0 and 1."""
    return np.random.default_rng(seed).uniform(0.2, 0.7, count).round(3).tolist()


def result(values: Sequence[float], *, task: str = "toy/test", num_documents: int = 50, metric: str = METRIC) -> Any:
    """Return a result whose first document is right where the value is above one half."""
    ids = [f"q{place:03}" for place in range(len(values))]
    return EvaluationResult(
        task=task,
        system="model",
        metrics={metric: float(np.mean(values))},
        per_query={metric: dict(zip(ids, map(float, values), strict=True))},
        run={
            query: (("right" if value > 0.5 else "wrong", 0.9), ("other", 0.1))
            for query, value in zip(ids, values, strict=True)
        },
        num_queries=len(values),
        num_documents=num_documents,
    )


def write_run(
    folder: Path,
    values: Sequence[float] | None,
    *,
    untrained: Sequence[float] | None = None,
    config: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
    report: Mapping[str, Any] | None = None,
    steps: int = 30,
    further: Mapping[str, Sequence[float]] | None = None,
    **options: Any,
) -> Path:
    """Write what a run leaves; without values one that hasn't finished, and with an empty report none."""
    folder.mkdir(parents=True)
    settings = {"metric_for_best_model": METRIC, "test_data_path": "gone.jsonl", "learning_rate": 2e-5}
    settings |= {"batch_size": "auto"} | dict(config or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    candidates = [{"recommended": True, "bytes_per_device": {"total": 4_000_000}}]
    decided = {"strategy": "single", "world_size": 1, "steps": 30, "batch_size": 16, "candidates": candidates}
    (folder / "plan.json").write_text(json.dumps(decided | dict(plan or {})), "utf-8")
    speed = {"step_seconds": 0.5, "samples_per_second": 32.0, "tokens_per_second": 640.0, "peak_memory_bytes": 5e6}
    rows = ({"step": n, "loss": 3.0 / n, "learning_rate": 1e-5 * n, **speed} for n in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    evaluation = folder / "evaluation"
    write_evaluation(evaluation / "step-0", result(untrained or values_of(0), task="toy/dev"))
    write_evaluation(evaluation / "step-30", result(values or values_of(1), task="toy/dev"))
    if values is None:
        return folder
    write_evaluation(evaluation / "final", result(values, **options))
    write_evaluation(evaluation / "baseline", result(untrained or values_of(0, count=len(values)), **options))
    for key, more in (further or {}).items():
        for place in ("baseline", "final"):
            write_evaluation(evaluation / key / place, result(more, task=f"toy/{key}"))
    written = {
        "schema_version": 1,
        "data_facts": [["training records", "84"], ["note", "held out"]],
        "data_hashes": {"training": "b" * 64, "test": CONTENT} if hashes is None else hashes,
        "environment": ENVIRONMENT,
    } | dict(report or {})
    if report != {}:
        (folder / "report").mkdir()
        (folder / "report" / "report.json").write_text(json.dumps(written), "utf-8")
        (folder / "report" / "report.html").write_text("<html></html>", "utf-8")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A baseline, a run that is better, and one that is the same but for noise."""
    values = values_of(1)
    noise = np.random.default_rng(5).normal(0, 0.05, len(values))
    better = np.clip(np.asarray(values) + 0.05 + noise, 0, 1).round(3).tolist()
    return [
        write_run(tmp_path / "first", values),
        write_run(tmp_path / "better", better, config={"learning_rate": 5e-5, "batch_size": 16}),
        write_run(tmp_path / "alike", values_of(3), report={"environment": {"torch": "2.16.0"}}),
    ]


def final(run: Path) -> dict[str, float]:
    values: dict[str, float] = json.loads((run / "evaluation/final/per_query.json").read_text())[METRIC]
    return values


def test_the_numbers_are_those_of_a_paired_t_test_over_the_same_queries(runs: list[Path]) -> None:
    found = compare_runs(runs)
    first, *others = [np.array(list(final(run).values())) for run in runs]
    expected = [stats.ttest_rel(other, first) for other in others]
    assert [each.word for each in found.verdicts] == ["better", "no difference"]
    assert [each.p_value for each in found.verdicts] == pytest.approx([each.pvalue for each in expected])
    assert [each.corrected for each in found.verdicts] == pytest.approx(holm([each.pvalue for each in expected]))
    for each, test, other in zip(found.verdicts, expected, others, strict=True):
        assert each.verdict is not None
        numbers, bounds = each.verdict.comparison, test.confidence_interval(0.95)
        assert numbers.difference == pytest.approx(float((other - first).mean()))
        assert (numbers.low, numbers.high) == pytest.approx((bounds.low, bounds.high))
        assert numbers == compare(result(first.tolist()), result(other.tolist()), METRIC)
        assert f"{numbers.difference:+.3f}".replace("-", MINUS) in each.sentence
    lines = found.tables[0].lines[METRIC]
    assert [line.name for line in lines] == ["untrained model", "first", "better", "alike"]
    assert lines[0].row.values["final"] == pytest.approx(np.mean(values_of(0)))
    assert lines[0].p_value is None
    screen = terminal_lines(found)
    assert re.search(r"better +0\.\d{3} \(0\.\d{3} to 0\.\d{3}\) +\+0\.\d{3} \(\+0\.\d{3} to \+0\.\d{3}\) ", screen[4])
    assert screen[4].endswith("▲ better")
    assert screen[-1] == found.verdicts[1].sentence
    turned = compare_runs(runs[:2], baseline=runs[1])
    assert [run.name for run in turned.runs] == ["better", "first"]
    assert (turned.verdicts[0].word, turned.notes) == ("worse", ())


def test_several_test_sets_are_judged_by_their_mean_and_guard_sets_beside_it(tmp_path: Path) -> None:
    values, noise = np.asarray(values_of(1)), np.random.default_rng(2).normal(0, 0.02, 40)
    first = write_run(
        tmp_path / "first",
        values.tolist(),
        hashes={},
        further={"test-1": values_of(2, count=20), "guard-2": values_of(3)},
    )
    gain, loss = (values + 0.1 + noise).tolist(), (np.asarray(values_of(3)) - 0.05 + noise).tolist()
    again = values_of(2, count=20)
    other = write_run(tmp_path / "other", gain, hashes={}, further={"test-1": again, "guard-2": loss})
    found = compare_runs([first, other])
    assert [(table.name, table.role) for table in found.tables] == [
        ("toy/test", "test"), ("toy/test-1", "test"), ("toy/guard-2", "guard"),
    ]  # fmt: skip
    verdict = found.verdicts[0]
    assert verdict.word == "better"
    assert verdict.verdict is not None
    assert verdict.verdict.comparison.metric == "mean ndcg@10 of 2 sets"
    assert verdict.verdict.comparison.difference == pytest.approx(np.mean(np.asarray(gain) - values) / 2)
    assert verdict.p_value == paired_p_value(
        [(result(values.tolist()), result(gain)), (result(again), result(again))], METRIC
    )
    assert "worse on 1 guard set (toy/guard-2)" in verdict.sentence
    p_values = [table.lines[METRIC][-1] for table in found.tables]
    assert [line.corrected for line in p_values] == pytest.approx(holm([line.p_value or 0.0 for line in p_values]))


def test_a_guard_set_is_lost_only_by_the_corrected_test(tmp_path: Path) -> None:
    """p 0.041 of the guard set alone is 0.083 beside the test set's; a p that stays under 0.05 is said."""
    values, noise = np.asarray(values_of(1)), np.random.default_rng(1).normal(0, 0.1, 40)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * 0.1
    first = write_run(tmp_path / "first", values.tolist(), hashes={}, further={"guard-1": values_of(3)})
    for t_value, alone, together in ((2.107, 0.0416, 0.0832), (2.5, 0.0168, 0.0335)):
        guarded = (np.asarray(values_of(3)) + noise - t_value * 0.1 / 40**0.5).tolist()
        kept = (values + noise).tolist()  # no difference in the mean: p 1
        other = write_run(tmp_path / f"run{t_value}", kept, hashes={}, further={"guard-1": guarded})
        found = compare_runs([first, other])
        line = found.tables[1].lines[METRIC][-1]
        assert (line.p_value, line.corrected) == (pytest.approx(alone, abs=1e-4), pytest.approx(together, abs=2e-4))
        assert ("worse on 1 guard set" in found.verdicts[0].sentence) == (together < 0.05)


def test_an_interval_that_leaves_out_0_is_no_difference_once_p_is_corrected(tmp_path: Path) -> None:
    values = values_of(1)
    noise = np.random.default_rng(1).normal(0, 0.1, (8, len(values)))
    noise -= noise.mean(axis=1, keepdims=True)
    shifts = noise / noise.std(axis=1, ddof=1, keepdims=True) * 0.1 + 2.2 * 0.1 / len(values) ** 0.5  # p of about 0.03
    paths = [write_run(tmp_path / "first", values)]
    paths += [write_run(tmp_path / f"run{n}", (np.asarray(values) + shift).tolist()) for n, shift in enumerate(shifts)]
    alone = compare_runs(paths[:2]).verdicts[0]
    together = compare_runs(paths).verdicts
    assert alone.word == "better"
    assert alone.p_value is not None
    assert 0.02 < alone.p_value < 0.05
    assert {each.word for each in together} == {"no difference"}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"values": values_of(2, count=30)}, "other queries"),
        ({"values": values_of(2), "num_documents": 60}, "60 documents and 50"),
        ({"values": values_of(2), "metric": "spearman"}, "spearman"),
        ({"values": None, "steps": 3}, "finished"),
        ({"values": values_of(7), "hashes": {"training": "b" * 64, "test": "c" * 64}}, "cccccccccccc and aaaaaaaaaaaa"),
    ],
    ids=["queries", "corpus", "metric", "unfinished", "content"],
)
def test_what_cant_be_compared_is_named(tmp_path: Path, runs: list[Path], written: Any, said: str) -> None:
    given = {"hashes": {}, **written}
    found = compare_runs([runs[0], write_run(tmp_path / "other", given.pop("values"), **given)])
    assert (found.verdicts[0].word, found.verdicts[0].p_value) == ("not compared", None)
    assert said in found.verdicts[0].sentence
    assert found.changes == ()
    if said == "finished" or not given["hashes"]:
        assert any("other" in note for note in found.notes)


def test_a_run_without_hashes_is_compared_by_its_queries_and_says_so(tmp_path: Path, runs: list[Path]) -> None:
    older = write_run(tmp_path / "older", values_of(2), hashes={}, config={"new_key": 3})
    bare = write_run(tmp_path / "bare", values_of(2), report={})
    found = compare_runs([runs[0], older, bare])
    assert [each.word == "not compared" for each in found.verdicts] == [False, False]
    assert len(found.tables[0].notes) == 1
    assert {name for name in ("older", "bare") if any(note.startswith(f"{name}: ") for note in found.notes)} == {
        "older", "bare"
    }  # fmt: skip
    assert found.config == {}, "a key that only one version has is no difference"
    assert any("new_key" in note for note in found.notes)


def test_sets_without_hashes_are_found_by_their_names_before_their_places(tmp_path: Path) -> None:
    small = values_of(2, count=30)
    first = write_run(tmp_path / "first", values_of(1), further={"test-1": small}, hashes={})
    turned = write_run(tmp_path / "turned", small, task="toy/test-1", further={"test-1": small}, hashes={})
    for name in ("baseline", "final"):
        write_evaluation(turned / "evaluation" / "test-1" / name, result(values_of(3)))  # toy/test
    found = compare_runs([first, turned])
    assert [table.lines[METRIC][-1].why_not for table in found.tables] == ["", ""]


def test_runs_on_graded_pairs_are_compared_by_their_rank_correlation(tmp_path: Path, runs: list[Path]) -> None:
    graded = [
        write_run(tmp_path / name, (np.asarray(values_of(1)) + shift).tolist(), metric="spearman", task="toy/pairs")
        for name, shift in (("one", 0.0), ("two", 0.05))
    ]
    found = compare_runs([*graded, runs[0]])
    assert (found.metric, found.tables[0].metric) == ("spearman", "spearman")
    assert [each.word for each in found.verdicts] == ["better", "not compared"]
    with pytest.raises(ConfigError, match=r"mrr@10.*spearman"):
        compare_runs(graded, metric="mrr@10")


def test_an_unfinished_first_run_leaves_the_baseline_to_a_finished_one(tmp_path: Path, runs: list[Path]) -> None:
    stopped = write_run(tmp_path / "stopped", None, steps=12)
    found = compare_runs([stopped, *runs[:2]])
    assert found.baseline.name == "first"
    assert any(note.startswith("stopped: ") and "12 of 30 steps" in note for note in found.notes)
    assert [place for place, _ in overlays(found)[0].curves] == [0, 1, 2]
    with pytest.raises(ConfigError, match="12 of 30"):
        compare_runs(runs, baseline=stopped)
    none = compare_runs([stopped, write_run(tmp_path / "too", None)], tmp_path / "report")
    assert (none.tables, len(overlays(none))) == ((), 3)
    assert (tmp_path / "report" / "compare.html").is_file()


def test_runs_are_named_by_folders_in_them_and_by_patterns_and_logs_are_passed_over(
    runs: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="first"):
        compare_runs([runs[0], runs[0] / "report"])
    assert len(compare_runs([runs[0] / "report", runs[1] / "evaluation"]).runs) == 2
    twice = compare_runs([runs[0], runs[1], runs[0]])
    assert (len(twice.runs), len(twice.notes)) == (2, 1)
    log = runs[0].with_name("first.log")
    log.touch()
    for named in ([runs[0], log, runs[1]], [str(log.with_name("*"))]):
        assert compare_runs(named).notes == ()
    (tmp_path / "notes").mkdir()
    found = compare_runs([str(tmp_path / "*")])
    assert [run.name for run in found.runs] == ["alike", "better", "first"]
    assert any("notes" in note for note in found.notes)
    for named in ([log], [runs[0], tmp_path / "nothing"], [runs[0], tmp_path], [runs[0], str(tmp_path / "x*")]):
        with pytest.raises(ConfigError):
            compare_runs(named)


def test_only_what_differs_is_listed_with_what_auto_became(runs: list[Path]) -> None:
    found = compare_runs(runs)
    assert found.config == {"learning_rate": ("2e-05", "5e-05", "2e-05")}
    assert {name: values[2] for name, values in found.environment.items()} == {
        "vembed": "none", "torch": "2.16.0", "device": "none",
    }  # fmt: skip
    assert found.data == {}
    assert "b" * 12 in found.data_sentence


def test_other_training_rows_are_told(tmp_path: Path, runs: list[Path]) -> None:
    hashes, facts = {"training": "d" * 64, "test": CONTENT}, [["training records", "90"]]
    found = compare_runs(
        [runs[0], write_run(tmp_path / "o", values_of(4), hashes=hashes, report={"data_facts": facts})]
    )
    assert found.data == {
        "training records": ("84", "90"),
        "content of the training rows": ("b" * 12, "d" * 12),
    }
    assert found.verdicts[0].p_value is not None


def test_planned_time_and_memory_stand_beside_the_measured_ones(runs: list[Path], tmp_path: Path) -> None:
    known = write_run(tmp_path / "known", values_of(1), plan={"rough_step_seconds": 4.0})
    blind = write_run(tmp_path / "blind", values_of(1), plan={"candidates": []})
    plan = json.loads((known / "plan.json").read_text())
    (known / "plan.json").write_text(json.dumps(plan | {"steps": 300}))  # it stopped early: 30 steps are compared
    found = compare_runs([runs[0], known, blind], tmp_path / "out")
    cost = found.costs[0]
    assert (cost.steps_done, cost.step_seconds, cost.samples_per_second) == (30, 15.0, 32.0)
    assert (cost.planned_bytes, cost.peak_bytes) == (4_000_000, 5e6)
    assert [each.planned_step_seconds for each in found.costs] == [None, 120.0, None]
    assert found.costs[2].planned_bytes is None
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| 15 s | 15 s (planned 2:00) | 15 s |" in text
    assert "| 4.77 MiB (planned 3.81 MiB) | 4.77 MiB (planned 3.81 MiB) | 4.77 MiB |" in text


def test_a_folder_of_seeds_points_to_their_runs(runs: list[Path], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", values_of(1))
    (folder / "seeds.json").write_text("{}")
    (folder / "model").mkdir()
    for path in (folder, folder / "model"):
        with pytest.raises(ConfigError, match=r"out/seed-\*"):
            compare_runs([path, runs[0]])
    write_run(folder / "seed-1", values_of(1))
    assert len(compare_runs([folder / "seed-1", runs[0]]).runs) == 2


BROKEN_FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "report/report.json", "evaluation/final/metrics.json",
    "evaluation/final/per_query.json", "evaluation/baseline/metrics.json", "evaluation/step-0/metrics.json",
)  # fmt: skip


@pytest.mark.parametrize("file", BROKEN_FILES)
def test_a_broken_file_of_a_run_is_told_or_passed_over(file: str, runs: list[Path]) -> None:
    for text in (b"", b"{", b"[1]", b"\xff\xfe", b'{"schema_version": 99}', b'{"candidates": [1], "metrics": 1}'):
        (runs[1] / file).write_bytes(text)
        found = compare_runs(runs[:2])
        if not found.runs[1].is_finished:
            assert any(note.startswith("better: ") for note in found.notes)


# --- the page


LIMIT = 2_000_000


def test_the_three_files_tell_the_same(runs: list[Path], tmp_path: Path) -> None:
    found = compare_runs(runs[:2], tmp_path / "report", command="vembed compare a b --output report")
    document = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert (document["schema_version"], document["baseline"]) == (1, "first")
    assert document["verdicts"][0]["sentence"] == found.verdicts[0].sentence
    assert document["verdicts"][0]["p_value"] == found.verdicts[0].p_value
    lines = document["sets"][0]["metrics"][METRIC]
    assert [line["run"] for line in lines] == ["untrained model", "first", "better"]
    assert lines[2]["against_baseline"]["difference"] == found.verdicts[0].verdict.comparison.difference
    html, markdown = ((tmp_path / "report" / name).read_text() for name in ("compare.html", "compare.md"))
    shown = assert_sound(html)
    assert len(shown.named("svg")) > 6, "three curves over steps and over seconds, and the intervals"
    for text in (shown.text, markdown):
        assert f"{found.verdicts[0].verdict.comparison.difference:+.3f}" in text
        assert "vembed compare a b --output report" in text


def test_hostile_names_and_texts_are_only_shown(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script> & \"x\" 'y' </li>"
    rows = [{"query": f"{hostile} {n}", "positive": f"{hostile} answer {n}"} for n in range(40)]
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    config = {"test_data_path": str(tmp_path / "test.jsonl"), "query_prompt": hostile}
    name = hostile.replace("/", "")
    first = write_run(tmp_path / name, values_of(1), task=hostile, config=config, hashes={})
    other = write_run(tmp_path / "b", values_of(2), task=hostile, hashes={})
    found = compare_runs([first, other], tmp_path / "report", command=hostile)
    assert "alert(1)" in assert_sound((tmp_path / "report" / "compare.html").read_text()).text
    assert "<script" not in (tmp_path / "report" / "compare.md").read_text().partition("```")[0]
    assert [tag for tag, _, _ in Page(found._repr_html_()).elements].count("iframe") == 1


@pytest.mark.slow
def test_the_curves_of_a_run_have_its_mark_in_every_form(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs" / f"run{n}", values_of(n)) for n in range(5)]
    for count, shapes in ((2, 3), (5, 0)):  # more curves than four are no rows of characters that can be told apart
        compare_runs(runs[:count], tmp_path / "report")
        page, text = ((tmp_path / "report" / f"compare.{form}").read_text() for form in ("html", "md"))
        assert '<strong class="series-1">● </strong>run0' in page
        assert '<strong class="series-2">■ </strong>run1' in page
        assert "- **●** run0\n- **■** run1" in text
        assert sum("● " in line and " ■ " in line for line in text.splitlines() if "over steps" in line) == shapes


def test_each_query_is_shown_with_what_both_models_put_first(tmp_path: Path) -> None:
    """The set is gone, so that only its ids can be shown, and nobody knows which documents are right."""
    runs = [write_run(tmp_path / "runs" / name, values_of(seed)) for name, seed in (("a", 1), ("b", 2))]
    changes = compare_runs(runs, tmp_path / "report").changes[0]
    page, text = ((tmp_path / "report" / f"compare.{form}").read_text() for form in ("html", "md"))
    shown = len(changes.won) + len(changes.lost)
    assert shown == 10
    for form in (page, text):
        assert form.count("a put first") == form.count("b put first") == shown
        assert all(example.query_id in form for example, _ in (*changes.won, *changes.lost))
        assert "✗" not in form
        assert "not retrieved" not in form


@pytest.mark.parametrize("strategy", ["epoch", "no"])  # in YAML 1.1, an unquoted no is false
def test_rows_that_a_run_held_out_are_read_again_as_it_read_them(tmp_path: Path, strategy: str) -> None:
    rows = ({"query": f"question {n}", "positive": f"answer {n}"} for n in range(1100))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    keys = {"model_name": "builtin:ngram-bag", "data_path": str(tmp_path / "rows.jsonl"), "val_fraction": 0.5}
    config = load_values(keys | {"eval_strategy": strategy}, {}).config
    data = load_data(config)
    key, task = ("dev", data.dev) if data.test is None else ("test", data.test)
    assert task is not None
    runs = []
    for name, seed in (("a", 1), ("b", 2)):
        values = values_of(seed, count=len(task.queries))
        runs.append(write_run(tmp_path / name, values, hashes={key: content_hash(task)}))
        (runs[-1] / "config.yaml").write_text(dump_config(config), "utf-8")
        per_query = {METRIC: dict(zip(task.queries, values, strict=True))}
        ranked = dict.fromkeys(task.queries, (("d", 0.9),))
        write_evaluation(runs[-1] / "evaluation/final", replace(result(values), per_query=per_query, run=ranked))
    found = compare_runs(runs)
    assert found.changes_note == ""
    assert found.task is not None
    assert found.task.queries == task.queries


def test_settings_are_read_as_the_run_wrote_them(tmp_path: Path, runs: list[Path]) -> None:
    other = write_run(tmp_path / "other", values_of(4))
    for run, rest in ((runs[0], "eval_strategy: no\nrun: 2024-01-01\n"), (other, "eval_strategy: epoch\nrun: on\n")):
        (run / "config.yaml").write_text(f"learning_rate: 2e-5\n{rest}", "utf-8")
    found = compare_runs([runs[0], other])
    assert found.config == {"eval_strategy": ("no", "epoch"), "run": ("2024-01-01", "on")}


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_page_of_many_runs_stays_small(tmp_path: Path, count: int) -> None:
    runs = [write_run(tmp_path / f"run{n:02}", values_of(n, count=200), steps=600) for n in range(count)]
    compare_runs(runs, tmp_path / "report")
    assert (tmp_path / "report" / "compare.html").stat().st_size < LIMIT
