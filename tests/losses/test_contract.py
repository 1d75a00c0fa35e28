"""Every loss keeps the contract of a loss, with each value of each of its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import EVERY_KIND, LossContract

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


@pytest.mark.parametrize("kind", kinds_with("temperature"))
def test_the_sharpest_temperature_keeps_the_digits_of_float32(kind: str) -> None:
    LossContract(kind).check_sharpest()


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if LossContract(kind).has_masks])
def test_masks_keep_a_text_that_answers_a_query_from_being_its_negative(kind: str) -> None:
    LossContract(kind).check_mask()
