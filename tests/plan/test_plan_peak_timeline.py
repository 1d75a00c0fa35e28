"""The worst moment of a step: by hand for small numbers of calls, and what must hold for any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vembed.plan.cost import Cut, Load, activation_moments, peak_of_step
from vembed.plan.memory import BytesPerDevice, CallCost, TowerSize


def tower(name: str = "text", *, saved: float = 10.0, extra: float = 1.0, trainable: int = 100) -> TowerSize:
    return TowerSize(
        name=name,
        max_tokens=10,
        num_parameters=100,
        num_trainable=trainable,
        largest_block=10,
        saved=CallCost(saved),
        transient=CallCost(extra),
        saved_checkpointed=CallCost(saved / 10),
        transient_checkpointed=CallCost(extra),
        forward_flops=CallCost(1.0),
        largest_tensor=50,
    )


PARTS = BytesPerDevice(parameters=1000, gradients=400, optimizer=800, activations=0, loss=60)


def worst(loads: list[Load], cut: Cut, **options: int) -> BytesPerDevice:
    return peak_of_step(PARTS, activation_moments(loads, cut), **{"tables": 20, "fresh": 200, **options})


def test_replay_holds_one_call_and_all_gradients() -> None:
    # 3 calls of 4 rows x 10 tokens: 400 bytes kept, 40 beyond.
    peak = worst([Load(tower(), 12, 10)], Cut(rows=4, tokens=1000))
    assert (peak.gradients, peak.activations, peak.loss) == (400, 440, 20)


def test_the_last_call_is_as_small_as_it_is() -> None:
    # 4 rows, then 1: the large one runs before there are gradients, 440; the small one beside them, 400 + 110.
    peak = worst([Load(tower(), 5, 10)], Cut(rows=4, tokens=1000))
    assert (peak.gradients, peak.activations) == (400, 200)  # the end of the second, with a fresh gradient
    peak = worst([Load(tower(), 5, 10)], Cut(rows=4, tokens=1000), fresh=0)
    assert (peak.gradients, peak.activations) == (400, 110)


def test_plain_training_has_no_gradients_beside_its_graphs() -> None:
    peak = worst([Load(tower(saved=100.0), 12, 10)], Cut(rows=100, tokens=1000))
    assert (peak.gradients, peak.activations) == (0, 12_120)


def test_retained_calls_stand_together_and_the_first_goes_before_the_gradients_come() -> None:
    peak = worst([Load(tower(saved=100.0, extra=2.0), 12, 10)], Cut(rows=4, tokens=1000, retain=1.0))
    assert (peak.gradients, peak.activations) == (0, 12_080)
    peak = worst([Load(tower(saved=2.0), 12, 10)], Cut(rows=4, tokens=1000, retain=1.0), fresh=0)
    assert (peak.gradients, peak.activations) == (400, 2 * 80 + 40)


def test_what_a_call_keeps_whatever_its_rows_counts_for_each_call() -> None:
    stack = replace(tower(extra=2.0), saved=CallCost(100.0, per_call=7.0))
    three = worst([Load(stack, 12, 10)], Cut(rows=4, tokens=1000, retain=1.0))
    one = worst([Load(stack, 12, 10)], Cut(rows=100, tokens=1000))
    assert three.activations == 12_080 + 3 * 7
    assert one.activations == 12_240 + 7


def test_all_calls_share_one_copy_of_the_weights_that_is_there_to_the_end() -> None:
    stack = replace(tower(extra=2.0), saved=CallCost(100.0), cast_bytes=70)
    for retain in (0.0, 1.0):
        load, cut = [Load(stack, 12, 10)], Cut(4, 1000, retain)
        plain = worst([Load(replace(stack, cast_bytes=0), 12, 10)], cut)
        assert worst(load, cut).activations == plain.activations + 70
    assert worst([Load(stack, 4, 10), Load(replace(stack, name="b"), 4, 10)], Cut(4, 40)).activations == 4080 + 2 * 70


def test_gradients_of_copies_wait_for_the_end_of_a_backward() -> None:
    stack = replace(tower(saved=1.0), cast_bytes=900)
    # 40 bytes kept and 40 beyond. At the end of the second call: 900 waiting, the table's fresh 200, all gradients.
    peak = worst([Load(stack, 12, 10)], Cut(rows=4, tokens=1000))
    assert (peak.gradients, peak.activations) == (400, 900 + 900 + 200)
    # A single call goes back before there are gradients.
    peak = worst([Load(stack, 4, 10)], Cut(rows=4, tokens=1000))
    assert (peak.gradients, peak.activations) == (0, 900 + 900)


def test_a_tower_that_comes_later_has_no_gradients_yet() -> None:
    loads = [Load(tower("vision", trainable=75), 4, 10), Load(tower("text", trainable=25), 4, 10)]
    moments = activation_moments(loads, Cut(rows=4, tokens=40)).moments
    assert [moment.gradients for moment in moments] == [0.0, 0.0, 0.75, 0.75], "a call and its end, tower after tower"


def test_texts_are_retained_before_pictures() -> None:
    loads = [Load(tower("vision", saved=3.0), 8, 10), Load(tower("text"), 8, 10)]
    assert activation_moments(loads, Cut(rows=4, tokens=40, retain=0.5)).kept == 8 * 10 * 10.0
    assert activation_moments(loads, Cut(rows=4, tokens=40, retain=0.75)).kept == 8 * 10 * 10.0 + 4 * 10 * 3.0
    assert activation_moments(loads, Cut(rows=4, tokens=40, retain=1.0, retain_tokens=79)).kept == 4 * 10 * 10.0


def test_what_does_not_train_keeps_no_gradients() -> None:
    loads = [Load(tower("vision", saved=0.0, extra=0.0, trainable=0), 8, 10), Load(tower("text"), 8, 10)]
    moments = activation_moments(loads, Cut(rows=4, tokens=40)).moments
    assert {moment.gradients for moment in moments} == {0.0, 1.0}


def test_gradients_of_earlier_batches_stay() -> None:
    load, cut = [Load(tower(), 12, 10)], Cut(rows=4, tokens=1000)
    held = peak_of_step(PARTS, activation_moments(load, cut), tables=20, fresh=200, held=True)
    assert held.gradients == 800
    assert worst(load, cut).gradients == 400


@pytest.mark.parametrize("retain", [0.0, 0.3, 0.5, 1.0])
def test_keeping_more_never_takes_less_in_the_loss(retain: float) -> None:
    load = [Load(tower(), 37, 10)]
    less, more = (activation_moments(load, Cut(4, 40, share)).kept for share in (retain, min(1.0, retain + 0.2)))
    assert less <= more
    assert activation_moments(load, Cut(4, 40, 1.0)).kept == 3700.0


def test_reduction_needs_room_for_the_largest_tensor() -> None:
    none = peak_of_step(PARTS, activation_moments([Load(tower(), 1, 1)], Cut(4, 40)), tables=0, fresh=0)
    parts = replace(PARTS, reduction=100)
    small = peak_of_step(parts, activation_moments([Load(tower(), 1, 1)], Cut(4, 40)), tables=0, fresh=90)
    large = peak_of_step(parts, activation_moments([Load(tower(), 1, 1)], Cut(4, 40)), tables=0, fresh=300)
    assert (none.reduction, small.reduction, large.reduction) == (0, 100, 300)
