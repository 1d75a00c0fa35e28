"""Every loss keeps the contract of a loss, with each value of each of its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from contract import EVERY_KIND, SHARPEST, LossContract

if TYPE_CHECKING:
    from kit.ranks import RankPool


FIRST = {name: kind for kind, (name, _) in reversed(EVERY_KIND.items())}
"""A kind of every loss: the default run draws few rows of the tables below, and no change may pass unseen by it."""

MERGED = (
    *("both directions", "all directions", "hardest", "sigmoid with prefixes", "triplet", "listed cosent"),
    *("listed sum", "colbert in both directions"),
)
"""A kind for everything that ranks merge, and two that only share the work."""


def kinds_with(*keys: str) -> list[str]:
    return [kind for kind in EVERY_KIND if all(LossContract(kind).has_key(key) for key in keys)]


def counts_rows(name: str, keys: dict[str, Any]) -> bool:
    """Return whether all terms of a loss belong to rows; spreading vectors out is of no row."""
    return "spread_out" not in (name, *keys.get("added_losses", ()))


def test_every_loss_streams_as_its_loops_say() -> None:
    for kind in FIRST.values():
        LossContract(kind).check_tiles()


def test_what_two_processes_merge_gives_the_loss_and_the_gradients_of_the_loops(two_ranks: RankPool) -> None:
    for kind in MERGED:
        LossContract(kind).check_processes(two_ranks)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_definition_is_that_of_loops_in_value_and_gradients(kind: str) -> None:
    LossContract(kind).check_definition()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_tiles_of_any_size_give_value_and_gradients_of_the_loops(kind: str) -> None:
    LossContract(kind).check_tiles()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_shares_of_ranks_add_up_to_the_loops(kind: str) -> None:
    LossContract(kind).check_ranks()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind not in MERGED])
def test_two_processes_have_the_loss_and_the_gradients_of_the_loops(two_ranks: RankPool, kind: str) -> None:
    LossContract(kind).check_processes(two_ranks)


@pytest.mark.parametrize("kind", kinds_with("mrl_dims"))
def test_prefixes_are_the_weighted_mean_of_the_loss_of_cut_embeddings(kind: str) -> None:
    LossContract(kind).check_prefixes()


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if any(map(LossContract(kind).has_key, SHARPEST))])
def test_the_sharpest_temperature_keeps_the_digits_of_float32(kind: str) -> None:
    LossContract(kind).check_sharpest()


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if LossContract(kind).has_masks])
def test_masks_keep_a_text_that_answers_a_query_from_being_its_negative(kind: str) -> None:
    LossContract(kind).check_mask()


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if LossContract(kind).has_masks])
def test_copies_of_the_only_positive_leave_no_loss_and_no_gradient(kind: str) -> None:
    if LossContract(kind).name == "sigmoid":
        pytest.skip("it asks of the positives themselves")
    LossContract(kind).check_masked()


@pytest.mark.parametrize("kind", [kind for kind, (name, keys) in EVERY_KIND.items() if counts_rows(name, keys)])
def test_equal_weights_change_nothing_and_a_batch_without_any_loses_nothing(kind: str) -> None:
    LossContract(kind).check_weights()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_not_a_number_reaches_the_loss(kind: str) -> None:
    LossContract(kind).check_not_a_number()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_half_precision_is_accumulated_in_float32(kind: str) -> None:
    LossContract(kind).check_half_precision()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_gradients_are_written_where_the_caller_says(kind: str) -> None:
    LossContract(kind).check_written()


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if "taught" in kind or "distillation" in kind])
def test_a_batch_without_a_teacher_is_refused(kind: str) -> None:
    LossContract(kind).check_teacher()
