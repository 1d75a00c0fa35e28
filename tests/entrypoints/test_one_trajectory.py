"""One configuration, one trajectory: how a step is computed may not change what is trained.

The table holds strategies, processes, chunks, retention, evaluation, resuming, accumulation and LoRA, every pair of
their values in at least one row. Each row is a run in float64 without dropout, and is compared with the plain run that
trains the same weights on the same batches: one process, no gradient caching, no evaluation, from start to end.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from kit.runs import Outcome, Site, run_here, run_keys, word_pairs, write_config, write_rows
from kit.several_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ROWS, BATCH, STEPS = 37, 8, 8
"""37 = 4 x 8 + 5: every fifth batch has 5 queries, which two processes can't share evenly."""
RESUMED = 3
"""A resumed run repeats the steps behind this one from its checkpoint."""


class Row(NamedTuple):
    """A way to compute the steps of a run.

    Attributes:
        strategy: "plain" is one graph of a whole batch; "cached" is GradCache on replicas; the others are FSDP's modes.
        ranks: Processes.
        chunk: Rows of a chunk.
        retain: Share of the chunks whose graphs are kept instead of computed twice.
        evaluated: An evaluation at every step, or none.
        resumed: The steps behind the third are computed again from its checkpoint.
        accumulated: Batches of a step. More than one changes what is trained.
        lora: Adapters alone are trained. Changes what is trained.
    """

    strategy: str
    ranks: int
    chunk: int | str | None
    retain: float | None
    evaluated: bool
    resumed: bool
    accumulated: int
    lora: bool


TRAJECTORY = [
    Row("plain", 1, None, None, True, False, 1, False),
    Row("plain", 2, None, None, False, True, 2, True),
    Row("cached", 1, 1, 1, False, False, 2, True),
    Row("cached", 1, "auto", 0, True, True, 1, True),
    Row("cached", 1, 3, 0.5, False, False, 1, True),
    Row("cached", 2, 3, 0.5, False, False, 2, False),
    Row("fast", 2, 3, 0.5, True, True, 1, True),
    Row("fast", 2, "auto", 1, False, False, 2, False),
    Row("fast", 2, 1, 0, False, False, 2, False),
    Row("lean", 2, "auto", 0, False, True, 2, False),
    Row("lean", 2, 3, 1, True, False, 1, True),
    Row("lean", 2, 1, 0.5, False, False, 2, True),
    Row("sharded", 2, 1, 1, True, True, 1, False),
    Row("sharded", 2, 3, 0, False, False, 1, True),
    Row("sharded", 2, "auto", 0.5, True, False, 2, False),
]


SHARDED = ("fast", "lean", "sharded")
VALUES: dict[str, tuple[Any, ...]] = {
    "strategy": ("plain", "cached", *SHARDED),
    "ranks": (1, 2),
    "chunk": (None, 1, 3, "auto"),
    "retain": (None, 0, 0.5, 1),
    "evaluated": (False, True),
    "resumed": (False, True),
    "accumulated": (1, 2),
    "lora": (False, True),
}


def is_possible(row: Row) -> bool:
    """Return whether the values of a row can stand together: a plain step has no chunks, one process no shards."""
    has_chunks = row.strategy != "plain"
    return has_chunks == (row.chunk is not None) == (row.retain is not None) and (
        row.ranks == 2 or row.strategy not in SHARDED
    )


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return the pairs of a row's values, each with its column."""
    return set(itertools.combinations(row._asdict().items(), 2))


def test_each_pair_of_values_that_can_stand_together_is_in_a_row() -> None:
    possible = filter(is_possible, itertools.starmap(Row, itertools.product(*VALUES.values())))
    assert all(is_possible(row) for row in TRAJECTORY)
    assert set().union(*map(pairs_of, possible)) == set().union(*map(pairs_of, TRAJECTORY))


def keys_of(row: Row) -> dict[str, Any]:
    """Return the keys of a run that say how it is computed."""
    keys: dict[str, Any] = {"num_processes": row.ranks, "gradient_accumulation_steps": row.accumulated}
    if row.strategy == "plain":
        keys["use_gradient_cache"] = False
    else:
        keys |= {"use_gradient_cache": True, "gradient_cache_chunk_size": row.chunk, "retain": row.retain}
    if row.strategy in SHARDED:
        keys |= {"use_fsdp": True, "fsdp_mode": row.strategy}
    if row.evaluated:
        keys |= {"eval_strategy": "steps", "eval_steps": 1}
    if row.lora:
        keys |= {"use_lora": True, "lora_r": 4, "learning_rate": 3e-2}
    return keys


@pytest.fixture(scope="module")
def common(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The keys that all runs have."""
    data = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", word_pairs()[:NUM_ROWS])
    return site.keys(
        model_name=str(site.bert_without_dropout), torch_dtype="float64", data_path=str(data), batch_size=None,
        global_batch_size=BATCH, max_steps=STEPS, eval_strategy="no", eval_steps=None, save_steps=RESUMED,
        save_total_limit=STEPS, learn_temperature=True, loss_bidirectional=True, num_workers=0, warmup_steps=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain_run(common: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Outcome]:
    """Return the plain run of a number of accumulated batches, with or without LoRA."""

    @functools.cache
    def run(accumulated: int, lora: bool) -> Outcome:
        plain = Row("plain", 1, None, None, False, False, accumulated, lora)
        return run_keys(tmp_path_factory.mktemp("plain"), common | keys_of(plain))

    return run


def row_case(row: Row) -> Any:
    """Return a row as a test's case. Each test run takes one that shards every weight and doesn't resume.

    A resumed run makes its optimizer before its first evaluation, and LoRA leaves the root unit alone.
    """
    always = row == Row("fast", 2, "auto", 1, False, False, 2, False)
    return pytest.param(row, id="-".join(map(str, row)), marks=[pytest.mark.always] if always else [])


@pytest.mark.parametrize("row", [row_case(row) for row in TRAJECTORY])
def test_a_run_follows_the_trajectory_of_the_plain_run(
    common: dict[str, Any], plain_run: Callable[[int, bool], Outcome], tmp_path: Path, row: Row
) -> None:
    expected = plain_run(row.accumulated, row.lora)
    assert expected.code == 0, expected.err
    assert len(expected.losses) == STEPS
    assert expected.losses[-1] < expected.losses[0], "it must learn something, or there is nothing to compare"
    start = run_here if row.ranks == 1 else run_ranks
    config = write_config(tmp_path, common | keys_of(row))
    run = start(config)
    assert run.code == 0, run.err
    if row.resumed:
        shutil.rmtree(tmp_path / f"out/checkpoints/step-{STEPS:08d}")
        run = start(config, "--config_override", f"resume={tmp_path}/out/checkpoints/step-{RESUMED:08d}")
        assert run.code == 0, run.err
        assert f"resume: continuing from {tmp_path}/out/checkpoints/step-{RESUMED:08d}" in run.flat
    plan = json.loads((run.folder / "plan.json").read_text("utf-8"))
    assert (plan["world_size"], plan["mode"]) == (row.ranks, row.strategy if row.strategy in SHARDED else None)
    if isinstance(row.chunk, int):
        assert run.rows[0]["num_chunks"] >= BATCH // row.ranks // row.chunk
    assert len(list((run.folder / "evaluation").iterdir())) >= (STEPS if row.evaluated else 0)
    assert run.losses == pytest.approx(expected.losses, abs=1e-10)
    norms = [[measured["grad_norm"] for measured in outcome.rows] for outcome in (run, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-8)


@pytest.mark.slow
def test_the_comparison_of_trajectories_sees_another_batch_order(site: Site, tmp_path: Path) -> None:
    keys = site.keys(model_name=str(site.bert_without_dropout), torch_dtype="float64", max_steps=3, eval_steps=3)
    one, other = run_keys(tmp_path / "1", keys), run_keys(tmp_path / "2", keys | {"seed": 7})
    assert one.losses != pytest.approx(other.losses, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"eval_strategy": "epoch", "eval_steps": None}, id="epoch", marks=pytest.mark.slow),
        pytest.param({"eval_steps": 1}, id="every step"),
        pytest.param({"eval_steps": 3, "bm25": True}, id="every third step", marks=pytest.mark.slow),
    ],
)
def test_losses_with_and_without_evaluation_are_bitwise_equal(
    site: Site, tmp_path: Path, changes: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"max_steps": 14, "gradient_cache_chunk_size": 6, "retain": 0}
    without = run_keys(tmp_path / "without", site.keys(**common, eval_strategy="no", eval_steps=None))
    evaluated = run_keys(tmp_path / "with", site.keys(**common | changes))
    assert (without.code, evaluated.code) == (0, 0), without.err + evaluated.err
    during = {path.name for path in (evaluated.folder / "evaluation").iterdir()} - {"baseline", "final", "bm25"}
    assert len(during) >= 4
    assert {path.name for path in (without.folder / "evaluation").iterdir()} == {"baseline", "final"}
    assert evaluated.same_rows == without.same_rows
    no_dropout = run_keys(tmp_path / "no dropout", site.keys(**common, model_name=str(site.bert_without_dropout)))
    assert evaluated.losses != no_dropout.losses, "the baseline's evaluation must not have switched dropout off"
    last = "checkpoints/step-00000014/model.safetensors"
    assert (evaluated.folder / last).read_bytes() == (without.folder / last).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_mixed_precision_trains_and_stays_near_full_precision(site: Site, tmp_path: Path, precision: str) -> None:
    keys = site.keys(model_name=str(site.bert_without_dropout), max_steps=12, eval_steps=6)
    full = run_keys(tmp_path / "full", keys)
    mixed = run_keys(tmp_path / "mixed", keys | {precision: True})
    assert mixed.code == 0, mixed.err
    assert mixed.last_line.startswith("improved")
    assert mixed.losses != full.losses
    # Beyond the first steps, rounding differences grow as they do between any two machines.
    assert mixed.losses[:4] == pytest.approx(full.losses[:4], rel=0.02)
    assert mixed.losses[-1] < mixed.losses[0]
