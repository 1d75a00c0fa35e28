"""Runs compared: paired numbers, what isn't comparable, and what is said of runs in every state."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from run_cases import CONTENT, METRIC, result, values_of, write_run
from scipy import stats

from vembed.errors import ConfigError
from vembed.evaluation.judge import compare, holm, paired_p_value
from vembed.workflows.comparison.compare import compare_runs
from vembed.workflows.comparison.page import overlays, terminal_lines

if TYPE_CHECKING:
    from pathlib import Path


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
    assert [each.p_value for each in found.verdicts] == pytest.approx([each.pvalue for each in expected])
    assert [each.corrected for each in found.verdicts] == pytest.approx(holm([each.pvalue for each in expected]))
    for each, test, other in zip(found.verdicts, expected, others, strict=True):
        assert each.verdict is not None
        numbers, bounds = each.verdict.comparison, test.confidence_interval(0.95)
        assert numbers.difference == pytest.approx(float((other - first).mean()))
        assert (numbers.low, numbers.high) == pytest.approx((bounds.low, bounds.high))
        assert numbers == compare(result(first.tolist()), result(other.tolist()), METRIC)


def test_each_pair_ends_in_a_sentence(runs: list[Path]) -> None:
    better, alike = compare_runs(runs).verdicts
    assert better.word == "better"
    assert better.sentence.startswith("better is better than first: ndcg@10 +0.0")
    assert "95% interval +0.0" in better.sentence
    assert "corrected for 2 comparisons" in better.sentence
    assert "40 queries" in better.sentence
    assert alike.word == "no difference"
    assert alike.sentence.startswith("No difference between alike and first can be told: ndcg@10 ")


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
    assert verdict.sentence.endswith("; worse on 1 guard set (toy/guard-2).")
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


def test_another_baseline_turns_the_verdict_round(runs: list[Path]) -> None:
    found = compare_runs(runs[:2], baseline=runs[1])
    assert [run.name for run in found.runs] == ["better", "first"]
    assert found.verdicts[0].sentence.startswith("first is worse than better: ndcg@10 \N{MINUS SIGN}0.0")
    assert found.notes == ()


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


def test_the_untrained_model_has_a_line_of_its_own(runs: list[Path]) -> None:
    lines = compare_runs(runs).tables[0].lines[METRIC]
    assert [line.name for line in lines] == ["untrained model", "first", "better", "alike"]
    assert lines[0].row.values["final"] == pytest.approx(np.mean(values_of(0)))
    assert lines[0].p_value is None


def test_a_changed_test_set_is_refused(runs: list[Path], tmp_path: Path) -> None:
    changed = write_run(tmp_path / "changed", values_of(7), hashes={"training": "b" * 64, "test": "c" * 64})
    found = compare_runs([*runs[:1], changed])
    assert found.verdicts[0].word == "not compared"
    assert found.verdicts[0].p_value is None
    assert (
        "other content than the baseline's toy/test (hash cccccccccccc and aaaaaaaaaaaa)" in found.verdicts[0].sentence
    )
    assert found.tables[0].lines[METRIC][-1].row.values == {}
    assert found.changes == ()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"values": values_of(2, count=30)}, "has other queries than the baseline's"),
        ({"values": values_of(2), "num_documents": 60}, "has another corpus than the baseline's: 60 documents and 50"),
        ({"values": values_of(2), "metric": "spearman"}, "has no ndcg@10 by query on toy/test; it has spearman"),
        ({"values": None, "steps": 3}, "it hasn't finished"),
    ],
)
def test_what_cant_be_compared_is_named(tmp_path: Path, runs: list[Path], written: Any, said: str) -> None:
    other = write_run(tmp_path / "other", written.pop("values"), hashes={}, **written)
    found = compare_runs([runs[0], other])
    assert found.verdicts[0].word == "not compared"
    assert said in found.verdicts[0].sentence
    assert any("other" in note for note in found.notes)


def test_a_run_without_hashes_is_compared_by_its_queries_and_says_so(tmp_path: Path, runs: list[Path]) -> None:
    older = write_run(tmp_path / "older", values_of(2), hashes={})
    bare = write_run(tmp_path / "bare", values_of(2), report={})
    found = compare_runs([runs[0], older, bare])
    assert [each.word == "not compared" for each in found.verdicts] == [False, False]
    assert "Not every run recorded the content of this set" in found.tables[0].notes[0]
    assert any(note.startswith("older: an older version of vembed wrote it") for note in found.notes)
    assert any(note.startswith("bare: it has no report") for note in found.notes)


def test_runs_on_graded_pairs_are_compared_by_their_rank_correlation(tmp_path: Path, runs: list[Path]) -> None:
    graded = [
        write_run(tmp_path / name, (np.asarray(values_of(1)) + shift).tolist(), metric="spearman", task="toy/pairs")
        for name, shift in (("one", 0.0), ("two", 0.05))
    ]
    found = compare_runs([*graded, runs[0]])
    assert found.metric == "spearman"
    assert found.tables[0].metric == "spearman"
    assert found.verdicts[0].sentence.startswith("two is better than one: spearman +0.050 (")
    assert found.verdicts[1].word == "not compared"
    assert "it has no spearman by query on toy/test; it has ndcg@10" in found.verdicts[1].sentence
    with pytest.raises(ConfigError, match="one has no metric mrr@10 by query; it has: spearman"):
        compare_runs(graded, metric="mrr@10")


def test_an_unfinished_first_run_leaves_the_baseline_to_a_finished_one(tmp_path: Path, runs: list[Path]) -> None:
    stopped = write_run(tmp_path / "stopped", None, steps=12)
    found = compare_runs([stopped, *runs[:2]])
    assert found.baseline.name == "first"
    assert "stopped hasn't finished, so first is the baseline." in found.notes
    assert any(note.startswith("stopped: it hasn't finished: 12 of 30 steps") for note in found.notes)
    assert [place for place, _ in overlays(found)[0].curves] == [0, 1, 2]
    with pytest.raises(ConfigError, match="can't be compared with: it hasn't finished: 12 of 30"):
        compare_runs(runs, baseline=stopped)


def test_runs_none_of_which_has_finished_still_have_curves(tmp_path: Path) -> None:
    found = compare_runs([write_run(tmp_path / name, None) for name in ("a", "b")], tmp_path / "report")
    assert "No run has finished: there are no results to compare yet." in found.notes
    assert found.tables == ()
    assert len(overlays(found)) == 3
    assert (tmp_path / "report" / "compare.html").is_file()


def test_one_run_and_the_same_run_twice_are_answered(runs: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"at least two runs, and there is one: .*first; what training did"):
        compare_runs([runs[0], runs[0] / "report"])
    found = compare_runs([runs[0], runs[1], runs[0]])
    assert len(found.runs) == 2
    assert any("is named twice and compared once" in note for note in found.notes)


def test_a_pattern_and_the_folders_in_a_run_name_runs(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    found = compare_runs([str(tmp_path / "*")])
    assert [run.name for run in found.runs] == ["alike", "better", "first"]
    assert any("notes is passed over" in note for note in found.notes)
    assert len(compare_runs([runs[0] / "report", runs[1] / "evaluation"]).runs) == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nothing", "there is no folder"),
        (lambda folder: folder, "It holds runs; name those: vembed compare"),
        (lambda folder: str(folder / "x*"), "matches no output folder of a run"),
    ],
)
def test_what_is_no_run_is_told_apart(runs: list[Path], tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare_runs([runs[0], make(tmp_path)])


def test_only_what_differs_is_listed_with_what_auto_became(runs: list[Path]) -> None:
    found = compare_runs(runs)
    assert {each.name: each.values for each in found.config} == {"learning_rate": ("2e-05", "5e-05", "2e-05")}
    assert {each.name: each.values[2] for each in found.environment} == {
        "vembed": "none", "torch": "2.16.0", "device": "none",
    }  # fmt: skip
    assert found.data == ()
    assert found.data_sentence == f"All runs trained on the same rows (hash {'b' * 12})."


def test_other_training_rows_are_told(tmp_path: Path, runs: list[Path]) -> None:
    other = write_run(
        tmp_path / "other",
        values_of(4),
        hashes={"training": "d" * 64, "test": CONTENT},
        report={"data_facts": [["training records", "90"]]},
    )
    found = compare_runs([runs[0], other])
    assert found.data_sentence == "The runs didn't train on the same rows."
    assert {each.name: each.values for each in found.data} == {
        "training records": ("84", "90"),
        "content of the training rows": ("b" * 12, "d" * 12),
    }
    assert found.verdicts[0].p_value is not None


def test_what_each_run_took_is_read_from_its_rows(runs: list[Path]) -> None:
    cost = compare_runs(runs).costs[0]
    assert (cost.steps_done, cost.step_seconds, cost.samples_per_second) == (30, 15.0, 32.0)
    assert (cost.planned_bytes, cost.peak_bytes) == (4_000_000, 5e6)


def test_planned_time_and_memory_stand_beside_the_measured_ones(runs: list[Path], tmp_path: Path) -> None:
    known = write_run(tmp_path / "known", values_of(1), plan={"rough_step_seconds": 4.0})
    blind = write_run(tmp_path / "blind", values_of(1), plan={"candidates": []})
    plan = json.loads((known / "plan.json").read_text())
    (known / "plan.json").write_text(json.dumps(plan | {"steps": 300}))  # it stopped early: 30 steps are compared
    compare_runs([runs[0], known, blind], tmp_path / "out")
    costs = {each["name"]: each["cost"] for each in json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]}
    assert {name: cost["planned_step_seconds"] for name, cost in costs.items()} == {
        "first": None, "known": 120.0, "blind": None,
    }  # fmt: skip
    assert costs["blind"]["planned_bytes"] is None
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| Time in steps | 15 s | 15 s (planned 2:00) | 15 s |" in text
    assert "| Memory at the peak | 4.77 MiB (planned 3.81 MiB) | 4.77 MiB (planned 3.81 MiB) | 4.77 MiB |" in text
    page = (tmp_path / "out" / "compare.html").read_text()
    assert '<span class="value">15 s</span><span class="bounds">planned 2:00</span>' in page


def test_logs_beside_runs_are_passed_over(runs: list[Path]) -> None:
    log = runs[0].with_name("first.log")
    log.touch()
    for named in ([runs[0], log, runs[1]], [str(log.with_name("*"))]):
        found = compare_runs(named)
        assert {run.name for run in found.runs} >= {"first", "better"}
        assert found.notes == ()
    with pytest.raises(ConfigError, match="none of the files named is a run"):
        compare_runs([log])


def test_a_folder_of_seeds_points_to_their_runs(runs: list[Path], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", values_of(1))
    (folder / "seeds.json").write_text("{}")
    for path in (folder, folder / "model"):
        path.mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=r"is of several seeds; name their runs: vembed compare .*out/seed-\*"):
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


def test_settings_that_an_older_version_lacks_are_told_apart_from_differences(tmp_path: Path, runs: list[Path]) -> None:
    newer = write_run(tmp_path / "newer", values_of(2), config={"new_key": 3})
    found = compare_runs([runs[0], newer])
    assert found.config == ()
    assert "first is of a version of vembed without new_key." in found.notes


def test_the_terminal_has_the_table_and_the_sentences(runs: list[Path]) -> None:
    lines = terminal_lines(compare_runs(runs))
    assert lines[0] == "toy/test (test set); 95% intervals in brackets"
    assert lines[1].split() == ["Run", METRIC, "Difference", "p", "p", "(Holm)", "Reading"]
    assert lines[2].split()[:2] == ["untrained", "model"]
    assert re.search(r"better +0\.\d{3} \(0\.\d{3} to 0\.\d{3}\) +\+0\.\d{3} \(\+0\.\d{3} to \+0\.\d{3}\) ", lines[4])
    assert lines[4].endswith("▲ better")
    assert lines[-1].startswith("No difference between alike and first")
