"""What may not change what is trained (evaluation, chunks, gradient caching), and what changes it only a little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from command_cases import Site, run_keys

if TYPE_CHECKING:
    from pathlib import Path


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


CHUNKS: dict[str, dict[str, Any]] = {
    "chunks of 1": {"gradient_cache_chunk_size": 1, "retain": 0},
    "chunks of 3": {"gradient_cache_chunk_size": 3, "retain": 0.5},
    "auto": {},
    "40 tokens": {"gradient_cache_chunk_tokens": 40, "retain": 1},
    "no gradient caching": {"use_gradient_cache": False},
}


def test_in_float64_without_dropout_the_trajectory_is_one_whatever_the_chunks(site: Site, tmp_path: Path) -> None:
    keys = site.keys(
        model_name=str(site.bert_without_dropout), torch_dtype="float64", max_steps=10, eval_steps=10,
        learn_temperature=True, loss_bidirectional=True,
    )  # fmt: skip
    runs = {name: run_keys(tmp_path / name, keys | changes) for name, changes in CHUNKS.items()}
    assert [run.code for run in runs.values()] == [0] * len(runs)
    chunks = {name: run.rows[0]["num_chunks"] for name, run in runs.items()}
    assert chunks["chunks of 1"] == 32
    assert 11 <= chunks["chunks of 3"] < 32
    assert chunks["auto"] == 1
    assert 1 < chunks["40 tokens"] < 32
    reference = runs["no gradient caching"].losses
    assert len(reference) == 10
    assert reference[8] < reference[0], "it must learn something, or there is nothing to compare"
    for name, run in runs.items():
        assert run.losses == pytest.approx(reference, abs=1e-10), name
        assert [row["grad_norm"] for row in run.rows] == pytest.approx(
            [row["grad_norm"] for row in runs["auto"].rows], rel=1e-8
        ), name


@pytest.mark.slow
def test_the_comparison_of_trajectories_sees_another_batch_order(site: Site, tmp_path: Path) -> None:
    keys = site.keys(model_name=str(site.bert_without_dropout), torch_dtype="float64", max_steps=3, eval_steps=3)
    one, other = run_keys(tmp_path / "1", keys), run_keys(tmp_path / "2", keys | {"seed": 7})
    assert one.losses != pytest.approx(other.losses, abs=1e-10)


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
