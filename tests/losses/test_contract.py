"""Every loss keeps the contract of a loss, with each value of each of its keys."""

from __future__ import annotations

import pytest
from contract import LossContract
from loss_kinds import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_any_size_give_value_and_gradients_of_the_definition(kind: str) -> None:
    LossContract(kind).check_tiles()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shares_of_ranks_add_up_to_the_definition(kind: str) -> None:
    LossContract(kind).check_ranks()


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_are_the_weighted_mean_of_the_loss_of_cut_embeddings(kind: str) -> None:
    contract = LossContract(kind)
    if not contract.has_key("mrl_dims"):
        pytest.skip("trains no prefixes")
    contract.check_prefixes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_sharpest_temperature_overflows_nowhere(kind: str) -> None:
    contract = LossContract(kind)
    if not contract.has_key("temperature"):
        pytest.skip("has no temperature")
    contract.check_sharpest()


@pytest.mark.parametrize("kind", KINDS)
def test_masks_keep_a_text_that_answers_a_query_from_being_its_negative(kind: str) -> None:
    contract = LossContract(kind)
    if not contract.has_masks:
        pytest.skip("has no masks, or another part that sees every document")
    contract.check_mask()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_slope_of_the_value(kind: str) -> None:
    contract = LossContract(kind)
    if contract.weighs_by_constants:
        pytest.skip("weighs by similarities that it doesn't differentiate")
    contract.check_differences()
