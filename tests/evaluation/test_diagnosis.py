"""What a run's numbers are said to mean: each rule on both sides of its threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vembed.evaluation.diagnosis import Setup, diagnose, diagnosis_lines, performance
from vembed.evaluation.judge import Comparison, Verdict

GPU = Setup(
    device="cuda", memory_bytes=80_000_000_000, num_cores=16, world_size=4, dtype="bfloat16", num_workers=4,
    chunk_rows=512, chunk_tokens=16384, keeps_all=True, smaller_chunk=None, learning_rate=2e-3, skipped_steps=0,
)  # fmt: skip


HEALTHY = {
    "step_seconds": 1.0, "data_seconds": 0.02, "encode_seconds": 0.85, "wait_seconds": 0.02, "loss_seconds": 0.03,
    "reduce_seconds": 0.04, "update_seconds": 0.02, "samples_per_second": 256.0, "tokens_per_second": 20000.0,
    "peak_memory_bytes": 60e9, "padding_ratio": 1.05, "replay_drift": 0.0, "num_chunks": 4, "oom_repairs": 0,
    "grad_norm": 0.7, "token_imbalance": 1.01, "encode_imbalance": 1.02, "slowest_rank": 3,
    "device_utilisation": 0.95,
}  # fmt: skip


def run_of(changes: dict[str, Any], *, steps: int = 12) -> list[dict[str, float]]:
    """Return the rows of a healthy run with some numbers changed in every step."""
    rows = [{"step": float(step), **HEALTHY, **changes} for step in range(1, steps + 1)]
    rows[0]["step_seconds"] = 60.0  # what the first step spends on warming up must not be blamed on anything
    return rows


def causes(changes: dict[str, Any], setup: Setup = GPU) -> list[str]:
    return [finding.cause for finding in diagnose(run_of(changes), setup)]


@pytest.mark.parametrize(("idle", "found"), [(2, ["steps without a gradient"]), (1, [])])
def test_some_steps_without_a_gradient_are_told_and_one_is_not(idle: int, found: list[str]) -> None:
    rows = run_of({})
    for row in rows[3 : 3 + idle]:
        row["grad_norm"] = 0.0
    assert [finding.cause for finding in diagnose(rows, GPU)] == found


def course(losses: tuple[float, float], norms: tuple[float, float], steps: int = 40) -> list[dict[str, float]]:
    """Return the rows of a run whose loss and gradient norm go evenly from one value to another."""
    rows = run_of({}, steps=steps)
    for key, (first, last) in (("loss", losses), ("grad_norm", norms)):
        for number, row in enumerate(rows):
            row[key] = first + (last - first) * number / (steps - 1)
    return rows


def judged(before: float, after: float) -> Verdict:
    word = "worse" if after < before - 0.01 else "improved" if after > before else "within noise"
    return Verdict(word, Comparison("ndcg@10", before, after, after - before, 0.0, 0.0, 100, 0.95), "")


@pytest.mark.parametrize(
    ("losses", "norms", "metrics", "cause"),
    [
        # Measured: loss, gradient norm and nDCG@10 of builtin models at a hundredth of the learning rate that fits, at
        # the one that fits, and at 100 to 10,000 times that.
        ((2.12, 2.02), (2.6, 2.6), (0.331, 0.333), "little learnt"),  # ngram-bag, 2e-5
        ((7.03, 6.41), (3.0, 3.8), (0.465, 0.461), "little learnt"),  # the same, sigmoid loss
        ((5.04, 4.52), (7.0, 5.8), (0.010, 0.046), "little learnt"),  # tiny-clip, 2e-5
        ((2.08, 1.13), (2.6, 1.9), (0.331, 0.389), None),  # ngram-bag, 2e-3
        ((3.78, 2.46), (0.8, 0.8), (0.331, 0.354), None),  # ngram-bag, 2e-4: slow
        ((4.75, 1.39), (6.6, 3.6), (0.010, 0.691), None),  # tiny-clip, 2e-3
        ((3.96, 0.33), (1.6, 0.11), (0.176, 0.566), None),  # static, 5e-2
        ((2.35, 1.47), (1.7, 0.16), (0.331, 0.325), "learning rate too high"),  # ngram-bag, 0.2
        ((4.97, 3.30), (3.7, 0.062), (0.010, 0.143), "learning rate too high"),  # tiny-clip, 0.2
        ((3.46, 4.73), (1.3, 0.09), (0.331, 0.027), "learning rate too high"),  # ngram-bag, 20
        ((5.13, 2.79), (0.82, 3200.0), (0.176, 0.437), "learning rate too high"),  # static, 20
        ((3.90, 1.86), (0.37, 0.088), (0.331, 0.169), "worse than the untrained model"),  # ngram-bag, 2
        # A trained model that is trained on: it gains little, but the loss falls; or it knows the rows already.
        ((0.60, 0.45), (1.0, 0.9), (0.650, 0.655), None),
        ((0.05, 0.05), (0.2, 0.2), (1.0, 1.0), None),
    ],
)
def test_what_was_learnt_is_told_of_runs_that_failed_and_not_of_those_that_learnt(
    losses: tuple[float, float], norms: tuple[float, float], metrics: tuple[float, float], cause: str | None
) -> None:
    rows = course(losses, norms)
    found = diagnose(rows, GPU, judged(*metrics))
    assert [finding.cause for finding in found] == ([] if cause is None else [cause])


def test_a_rate_that_throws_the_loss_back_again_and_again_is_too_high_wherever_the_last_steps_fall() -> None:
    rows = course((2.84, 1.02), (4.3, 0.094))  # ngram-bag, 50
    assert not diagnose(rows, GPU, judged(0.081, 0.395))
    rows[len(rows) * 2 // 3]["loss"] = 10.65
    (found,) = diagnose(rows, GPU, judged(0.081, 0.395))
    assert found.cause == "learning rate too high"
    assert "jumped to 10.65 in the second half" in found.sentence
    assert diagnose(rows[:19], GPU, judged(0.3, 0.3)) == (), "19 steps are too few to judge a course by"


def test_a_loss_of_0_is_told_once_and_only_where_it_was_never_more() -> None:
    rows = course((0.0, 0.0), (0.0, 0.0))
    assert [finding.cause for finding in diagnose(rows, GPU, judged(0.3, 0.3))] == ["loss of 0"]
    rows[0]["loss"] = 1e-3
    assert "loss of 0" not in [finding.cause for finding in diagnose(rows, GPU, judged(0.3, 0.3))]


def test_a_healthy_run_has_no_finding_and_the_log_shows_the_split() -> None:
    assert causes({}) == []
    assert ("diagnosis", "nothing stands out") in diagnosis_lines(run_of({}), ())
    assert diagnose([], GPU) == ()
    rows = run_of({"data_seconds": 0.5, "step_seconds": 2.0})
    lines = list(diagnosis_lines(rows, found := diagnose(rows, GPU)))
    assert lines[0] == ("time of step", "2 s on average")
    assert [line.split()[0] for _, line in lines[1:3]] == ["25%", "42%"]
    assert any(found[0].advice in line for _, line in lines)


@pytest.mark.parametrize(
    ("cause", "beyond", "within"),
    [
        ("steps without a gradient", {"grad_norm": 0.0}, {"grad_norm": 1e-30}),
        ("waiting for data", {"data_seconds": 0.21}, {"data_seconds": 0.19}),
        ("padding", {"padding_ratio": 1.3}, {"padding_ratio": 1.2}),
        ("replay drift", {"replay_drift": 2e-2}, {"replay_drift": 5e-3}),
        ("communication", {"reduce_seconds": 0.25}, {"reduce_seconds": 0.19}),
        ("uneven processes", {"wait_seconds": 0.12}, {"wait_seconds": 0.09}),
        ("GPU utilisation", {"device_utilisation": 0.79}, {"device_utilisation": 0.81}),
        ("little memory left", {"peak_memory_bytes": 75e9}, {"peak_memory_bytes": 70e9}),
        ("little memory left", {"largest_rank_memory_bytes": 75e9}, {"largest_rank_memory_bytes": 70e9}),
        ("out of memory", {"oom_repairs": 1}, {"oom_repairs": 0}),
    ],
)  # fmt: skip
def test_each_rule_speaks_beyond_its_threshold_and_not_within(
    cause: str, beyond: dict[str, float], within: dict[str, float]
) -> None:
    assert causes(beyond) == [cause]
    assert causes(within) == []


BARE = replace(GPU, keeps_some=False)
LADDER = replace(GPU, oom_ladder=("gradient_checkpointing: true: 3 GiB", "use_fsdp: true: 2 GiB"))


@pytest.mark.parametrize(
    ("changes", "setup", "told", "untold"),
    [
        ({"data_seconds": 0.4}, GPU, ("40% of a step (400 ms of 1 s)", "num_workers, now 4", "16 cores"), ""),
        ({"data_seconds": 0.4}, replace(GPU, num_workers=16), ("All cores",), "num_workers, now"),
        ({"wait_seconds": 0.3, "token_imbalance": 1.4}, GPU, ("1.40 times", "spread unevenly"), "process 3"),
        ({"wait_seconds": 0.3, "encode_imbalance": 1.4}, GPU, ("process 3",), "spread unevenly"),
        ({"device_utilisation": 0.4}, GPU, ("gradient_cache_chunk_tokens, now 16384",), ""),
        ({"oom_repairs": 1}, replace(GPU, smaller_chunk=(128, 4096)),
         ("12 times", "gradient_cache_chunk_size: 128, gradient_cache_chunk_tokens: 4096"), "By the plan"),
        ({"oom_repairs": 1}, GPU, ("retain", "gradient_cache_chunk_tokens, now 16384"), ""),
        ({"oom_repairs": 1}, BARE, ("gradient_cache_chunk_tokens lower, now 16384",), "retain"),
        ({"oom_repairs": 1}, replace(BARE, smaller_chunk=(16, 2048)), ("gradient_cache_chunk_tokens: 2048",), "retain"),
        ({"oom_repairs": 1}, LADDER, LADDER.oom_ladder, ""),
        ({"peak_memory_bytes": 79e9}, LADDER, LADDER.oom_ladder, ""),
        ({"peak_memory_bytes": 79e9}, BARE, ("gradient_cache_chunk_tokens",), "retain"),
    ],
)  # fmt: skip
def test_a_finding_has_its_numbers_and_the_keys_that_help_here(
    changes: dict[str, Any], setup: Setup, told: tuple[str, ...], untold: str
) -> None:
    (finding,) = diagnose(run_of(changes), setup)
    text = f"{finding.sentence} {finding.advice}"
    assert [words for words in told if words not in text] == []
    assert not untold or untold not in text


def test_a_learning_rate_to_try_is_named() -> None:
    for losses, norms, after, rate in (
        ((2.1, 2.0), (1.0, 1.0), 0.3, " 0.02"),
        ((2.1, 2.0), (1.0, 0.01), 0.3, " 0.0002"),
        ((2.1, 1.0), (1.0, 1.0), 0.2, " 0.0002"),
    ):
        (finding,) = diagnose(course(losses, norms), GPU, judged(0.3, after))
        assert rate in finding.advice
        assert "now 0.002" in finding.advice


def test_an_idle_gpu_is_told_why_it_idles() -> None:
    starved = diagnose(run_of({"device_utilisation": 0.4, "data_seconds": 0.5}), GPU)
    assert [finding.cause for finding in starved] == ["waiting for data", "GPU utilisation"]
    lonely = diagnose(run_of({"device_utilisation": 0.4, "reduce_seconds": 0.5}), GPU)
    assert "data" in starved[1].advice
    assert "other processes" in lonely[1].advice


def test_utilisation_that_nobody_measured_is_said_so_on_a_gpu_only() -> None:
    rows = [{key: value for key, value in row.items() if key != "device_utilisation"} for row in run_of({})]
    unmeasured = replace(GPU, can_measure_utilisation=False)
    assert "pip install nvidia-ml-py" in diagnose(rows, unmeasured)[0].advice
    assert diagnose(rows, GPU) == ()
    assert diagnose(rows, replace(unmeasured, device="cpu")) == ()


def test_drift_is_judged_by_what_the_number_format_explains() -> None:
    single = replace(GPU, dtype="float32")
    assert causes({"replay_drift": 5e-5}, single) == ["replay drift"]
    assert causes({"replay_drift": 5e-6}, single) == []
    assert causes({"replay_drift": 5e-5}) == [], "bfloat16 rounds more"


def test_spare_memory_is_offered_only_where_rows_are_encoded_twice_on_a_device_of_its_own() -> None:
    twice, spare = replace(GPU, keeps_all=False), {"peak_memory_bytes": 30e9}
    assert causes(spare, twice) == ["memory to spare"]
    assert causes({"peak_memory_bytes": 50e9}, twice) == []
    assert causes(spare, GPU) == [], "every graph is kept"
    assert causes(spare | {"num_chunks": 1}, twice) == [], "one chunk is never encoded twice"
    assert causes(spare, replace(twice, device="cpu")) == [], "a CPU's memory is shared"
    assert causes(spare | {"oom_repairs": 1}, twice) == ["out of memory"]


def test_skipped_steps_come_first() -> None:
    found = diagnose(run_of({"data_seconds": 0.5}), replace(GPU, skipped_steps=2))
    assert [finding.cause for finding in found] == ["numbers that aren't finite", "waiting for data"]
    assert found[0].sentence.startswith("2 steps were skipped")


def test_few_steps_say_nothing_of_times_but_of_memory() -> None:
    rows = run_of({"data_seconds": 0.9, "peak_memory_bytes": 79e9}, steps=5)
    assert [finding.cause for finding in diagnose(rows, GPU)] == ["little memory left"]
    rows = run_of({"data_seconds": 0.9}, steps=6)
    assert [finding.cause for finding in diagnose(rows, GPU)] == ["waiting for data"]


def test_a_run_of_milliseconds_is_not_told_to_raise_its_workers() -> None:
    brief = {key: value / 100 for key, value in HEALTHY.items() if key.endswith("_seconds")} | {"data_seconds": 0.005}
    assert causes(brief) == [], "12 steps of 10 ms waited 60 ms in all"
    assert causes({"data_seconds": 0.5}) == ["waiting for data"]


def test_performance_is_one_row_with_rates_over_all_settled_time() -> None:
    rows = run_of({})
    rows[-1] |= {"step_seconds": 9.0, "samples_per_second": 10.0}
    row = performance(rows, GPU, model="bert", strategy="ddp", global_batch_size=256)
    assert list(row)[:3] == ["model", "strategy", "global_batch_size"]
    assert row["samples_per_second"] == pytest.approx((10 * 256 + 9 * 10) / 19)
    assert row["processes"] == 4
    assert row["peak_memory_bytes"] == 60e9
    assert "scaling_efficiency" not in row, "what wasn't measured is left out"
    assert performance([{**HEALTHY, "scaling_efficiency": 0.9}], GPU)["scaling_efficiency"] == 0.9
