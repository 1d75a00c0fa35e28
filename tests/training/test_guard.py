"""Numbers that are not finite: which steps are refused, on every rank, and what is reported of them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from vembed.errors import NonFiniteError
from vembed.gradcache.engine import StepResult
from vembed.training.guard import NonFiniteGuard
from vembed.training.step_totals import StepTotals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def accepts(
    guard: NonFiniteGuard,
    step: int = 7,
    *,
    loss: float = 0.5,
    grad_norm: float = 1.0,
    module_norms: Callable[[], dict[str, float]] = lambda: {"encoder.layer.0": 1.0, "head": float("nan")},
) -> bool:
    return guard.accepts(
        step, loss=loss, grad_norm=grad_norm, rows=lambda: PLACES, temperature=0.05, module_norms=module_norms
    )


PLACES = ["a.jsonl:3", "b.jsonl:1"]
BAD = [(math.nan, 1.0), (0.5, math.inf), (-math.inf, math.nan)]


def test_a_finite_step_is_accepted_without_computing_norms_or_writing(tmp_path: Path) -> None:
    def never() -> dict[str, float]:
        raise AssertionError("costly, and not needed")

    guard = NonFiniteGuard("stop", limit=0, folder=tmp_path / "run")
    assert accepts(guard, loss=1e30, grad_norm=0.0, module_norms=never)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("loss", "grad_norm"), BAD)
def test_stop_raises_and_leaves_a_report_that_any_json_reader_reads(
    tmp_path: Path, loss: float, grad_norm: float
) -> None:
    guard = NonFiniteGuard("stop", limit=10, folder=tmp_path / "run")
    with pytest.raises(NonFiniteError) as caught:
        accepts(guard, loss=loss, grad_norm=grad_norm)
    message = str(caught.value)
    path = tmp_path / "run" / "nonfinite-step-7.json"
    assert caught.value.exit_code == 4
    for part in ("step 7", "not finite in head", "learning_rate", "max_grad_norm", "temperature", str(path)):
        assert part in message
    assert ("the loss is" in message) == (not math.isfinite(loss))
    assert ("the gradient norm is" in message) == (not math.isfinite(grad_norm))

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 7,
        "loss": loss if math.isfinite(loss) else str(loss),
        "grad_norm": grad_norm if math.isfinite(grad_norm) else str(grad_norm),
        "temperature": 0.05,
        "module_grad_norms": {"encoder.layer.0": 1.0, "head": "nan"},
        "rows": PLACES,
    }


def test_skip_refuses_up_to_the_limit_in_the_whole_run_also_after_a_resume_and_then_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = NonFiniteGuard("skip", limit=2, folder=tmp_path)
    assert not accepts(guard, 1, loss=math.nan)
    assert accepts(guard, 2)
    assert not accepts(guard, 3, grad_norm=math.inf)
    assert accepts(guard, 4)
    assert guard.skipped == 2
    assert "step skipped (2 of at most 2)" in caplog.text
    guard = NonFiniteGuard("skip", limit=2, folder=tmp_path, skipped=guard.skipped)
    with pytest.raises(NonFiniteError, match="2 steps were skipped before, all that max_skipped_steps allows"):
        accepts(guard, 5, loss=math.nan)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"nonfinite-step-{step}.json" for step in (1, 3, 5)]


def test_all_ranks_refuse_a_step_that_is_not_finite_on_one(tmp_path: Path) -> None:
    asked: list[bool] = []

    def other_rank_has_nan(ok: bool) -> bool:
        asked.append(ok)
        return False

    guard = NonFiniteGuard("stop", limit=0, folder=tmp_path, agree=other_rank_has_nan)
    with pytest.raises(NonFiniteError, match="another process"):
        accepts(guard, module_norms=lambda: {"head": 1.0})
    assert asked == [True]


def test_a_report_that_can_not_be_written_does_not_hide_the_numbers_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        accepts(NonFiniteGuard("stop", limit=0, folder=tmp_path / "file"), loss=math.nan)
    assert "can't be written" in caplog.text


@pytest.mark.parametrize("drifts", [(math.nan, 1e-7), (1e-7, math.nan)])
def test_a_drift_of_nan_stays_nan_over_the_batches_of_a_step(drifts: tuple[float, float]) -> None:
    batch: Any = SimpleNamespace(
        structure=SimpleNamespace(num_queries=8, source=None), record_ids=[], num_truncated=0, num_masked=None
    )
    totals = StepTotals()
    for drift in drifts:
        counts = dict.fromkeys(("num_chunks", "tokens", "padded_tokens"), 1)
        totals.add(batch, StepResult(loss=1.0, rank_loss=1.0, replay_drift=drift, **counts))
    assert math.isnan(totals.replay_drift)
