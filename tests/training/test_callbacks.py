"""Callbacks: who is asked, what may be answered, and that all ranks do the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError
from vembed.training.callbacks import (
    Callbacks,
    Decision,
    EvaluationEvent,
    LearningRate,
    SaveEvent,
    StepEvent,
    Stop,
)

if TYPE_CHECKING:
    from kit.ranks import RankPool

STEP = StepEvent(1, 10, 0.5, 1e-3, {})
SAVED = SaveEvent(1, Path("checkpoints/step-1"))


class Patient:
    def on_evaluation(self, event: EvaluationEvent) -> Stop | None:
        return Stop("enough") if len(event.history) > 1 else None


def test_methods_hear_their_events_and_functions_hear_all() -> None:
    heard: list[object] = []
    callbacks = Callbacks([Patient(), heard.append])
    second = EvaluationEvent(2, {}, True, ((1, {}), (2, {})))
    assert callbacks.notify(STEP, Ranks()) == Decision()
    assert callbacks.notify(second, Ranks()) == Decision(stop="enough")
    assert heard == [STEP, second]
    assert callbacks.names == "Patient, append"
    assert not Callbacks([Patient()]).hear(StepEvent), "no collective for what nobody hears"


def test_the_later_decision_counts() -> None:
    callbacks = Callbacks([lambda _: LearningRate(1.0), lambda _: LearningRate(0.5), lambda _: Stop("now")])
    assert callbacks.notify(STEP, Ranks()) == Decision("now", 0.5)
    narrow = Callbacks([lambda _: LearningRate(np.float32(0.5))]).notify(STEP, Ranks())  # type: ignore[arg-type]
    assert type(narrow.learning_rate) is float, "checkpoints hold it as JSON"


@pytest.mark.parametrize(
    ("answer", "event", "words"),
    [
        (True, STEP, "on_step returned True; it may return None, vembed.Stop or vembed.LearningRate"),
        (Stop("x"), SAVED, "on_save returned .*; it may return None"),
        (LearningRate(-1.0), STEP, "a learning rate is a number of at least 0"),
        (Stop(None), STEP, "the reason to stop is a text"),  # type: ignore[arg-type]
        (LearningRate(float("nan")), STEP, "a learning rate is a number of at least 0"),
    ],
)
def test_what_a_callback_may_not_say_is_its_failure(answer: Any, event: Any, words: str) -> None:
    callbacks = Callbacks([lambda _: answer])
    assert callbacks.notify(event, Ranks()).failed is not None
    with pytest.raises((TypeError, ValueError), match=words):
        raise callbacks.failure or AssertionError


def test_a_callback_that_fails_is_the_last_that_is_asked() -> None:
    heard: list[object] = []

    def broken(event: object) -> None:
        raise ZeroDivisionError("mine")

    callbacks = Callbacks([broken, heard.append])
    assert callbacks.notify(STEP, Ranks()).failed == "the callback broken failed in on_step"
    assert isinstance(callbacks.failure, ZeroDivisionError)
    callbacks.notify(STEP, Ranks())
    assert not heard


@pytest.mark.parametrize("wrong", [5, Patient, object()])
def test_what_is_no_callback_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="is no callback; give a function of an event"):
        Callbacks([wrong])


def _ask_on_a_rank(rank: int) -> tuple[Decision, int, str, str]:
    calls = []

    def halve(event: StepEvent) -> LearningRate:
        calls.append(event)
        return LearningRate(event.learning_rate / 2)

    ranks = Ranks.of_this_process()
    decision = Callbacks([halve]).notify(STEP, ranks)
    failing = Callbacks([lambda event: 1 / 0])
    failed = failing.notify(STEP, ranks).failed or ""
    return decision, len(calls), failed, type(failing.failure).__name__


def test_the_first_rank_is_asked_and_all_ranks_decide_the_same(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_ask_on_a_rank)
    assert first[0] == second[0] == Decision(learning_rate=5e-4)
    assert (first[1], second[1]) == (1, 0)
    assert first[2] == second[2] == "the callback <lambda> failed in on_step"
    assert (first[3], second[3]) == ("ZeroDivisionError", MachineError.__name__)
