"""InfoNCE over the hardest negatives: with ties, with copies, and as InfoNCE where all of them count."""

from __future__ import annotations

import pytest
import torch
from loss_cases import CASES, LossCase, masked_cells, plain
from streamed_cases import assert_equal, defined, over_ranks, random_case, streamed
from torch import Tensor

from vembed.config.load import load_config
from vembed.losses.base import LossCommon
from vembed.losses.in_batch_hard import InBatchHard
from vembed.losses.infonce import InfoNCE
from vembed.losses.streamed import Hardest

SCALE = 5.0


def slow(case: LossCase, q_QE: Tensor, d_DE: Tensor, most: int, *, bidirectional: bool) -> Tensor:
    """Return the loss by Python's own sort of each query's (and each wanted document's) negatives."""
    masked, positives = masked_cells(case), set(case.positives)
    logits_QD = SCALE * torch.stack([torch.stack([(q * d).sum() for d in d_DE]) for q in q_QE])

    def direction(groups: list[list[tuple[int, int]]]) -> Tensor:
        terms = []
        for group in groups:
            wanted = [logits_QD[cell].exp() for cell in group if cell in positives]
            others = sorted((cell for cell in group if cell not in positives | masked), key=lambda c: -logits_QD[c])
            chosen = [logits_QD[cell].exp() for cell in others[:most]]  # the sort is stable: the first of equal ones
            terms.append(-torch.log(sum(wanted) / sum(wanted + chosen)))
        return torch.stack(terms).mean()

    rows, columns = range(len(case.queries)), sorted({document for _, document in case.positives})
    loss = direction([[(i, j) for j in range(len(case.documents))] for i in rows])
    return (loss + direction([[(i, j) for i in rows] for j in columns])) / 2 if bidirectional else loss


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 0, 5)])
def test_of_equal_logits_the_first_rows_count_whatever_the_tiles_and_ranks(sizes: tuple[int, ...]) -> None:
    case = plain(6, 9)
    rng = torch.Generator().manual_seed(0)
    q_QE, d_DE = (torch.randint(-1, 2, (rows, 4), generator=rng).double() for rows in (6, 9))
    logits_QD = q_QE @ d_DE.T
    assert max(len(row) - len(row.unique()) for row in logits_QD) > 5, "many are equal"
    for most in (1, 2, 3, 5):
        whole = InBatchHard(hard_topk=most, temperature=1.0, bidirectional=True, dtype=torch.float64, tile_size=100)
        expected = defined(whole, case, q_QE, d_DE)
        for tile_size in (1, 2, 4, 100):
            whole.tile_size = tile_size
            assert_equal(over_ranks(whole, case, q_QE, d_DE, sizes), expected)
    moved = defined(whole, case, q_QE, d_DE + 1e-6 * torch.randn(9, 4, generator=rng, dtype=torch.float64))
    assert (moved.dd_DE - expected.dd_DE).abs().max() > 1e-3, "another choice among equal ones gives another gradient"


def test_a_document_that_is_not_chosen_has_no_gradient() -> None:
    case = plain(2, 9)
    q_QE, d_DE = case.embeddings()
    found = streamed(InBatchHard(hard_topk=1, temperature=0.2, tile_size=4), case, q_QE, d_DE)
    chosen = (q_QE @ d_DE.T).detach().masked_fill(torch.eye(2, 9, dtype=torch.bool), -2).argmax(1)
    assert set(found.dd_DE.abs().sum(1).nonzero().view(-1).tolist()) == {0, 1, *chosen.tolist()}


def test_enough_of_them_are_infonce() -> None:
    case = random_case(5, num_queries=9, num_documents=17, texts=20)
    q_QE, d_DE = case.embeddings()
    options = {"temperature": 0.1, "learn_temperature": True, "bidirectional": True, "dtype": torch.float64}
    expected = defined(InfoNCE(**options), case, q_QE, d_DE)
    for most in (17, 100, None):
        assert_equal(streamed(InBatchHard(hard_topk=most, tile_size=4, **options), case, q_QE, d_DE), expected)
    fewer = InBatchHard(hard_topk=2, **options)
    assert streamed(fewer, case, q_QE, d_DE).loss < expected.loss - 0.05


def test_masked_cells_are_not_chosen() -> None:
    case = CASES["a positive text that stands twice"]
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    d_DE[1] = d_DE[0] = q_QE[0]  # the copy is the most similar of all
    masked, unmasked = (
        streamed(InBatchHard(hard_topk=1, temperature=1 / SCALE, mask_false_negatives=mask), case, q_QE, d_DE).loss
        for mask in (True, False)
    )
    assert abs(masked - slow(case, q_QE, d_DE, 1, bidirectional=False)) < 1e-6
    assert unmasked > masked + 0.1


def test_lists_keep_the_first_of_equal_numbers_and_let_not_a_number_through() -> None:
    numbers = torch.tensor([[2.0, 1.0, 2.0, 0.0, 1.0, 1.0], [0.0, -0.0, 0.0, 0.0, -0.0, 0.0]])
    found = Hardest.empty(1, 2, 4, like=numbers)
    for first in (0, 1, 3):
        last = {0: 1, 1: 3, 3: 6}[first]
        found.add_logits((0, slice(0, 2)), numbers[:, first:last].contiguous(), first)
    assert [sorted(row) for row in found.positions[0].tolist()] == [[0, 1, 2, 4], [0, 1, 2, 3]]
    found.add_logits((0, slice(1, 2)), torch.full((1, 6), torch.nan), 6)
    assert found.logits[0, 1].isnan().all()
    assert 0 <= found.positions.min() <= found.positions.max() < 12


def test_the_keys_make_it() -> None:
    def made(*overrides: str) -> InBatchHard:
        config = load_config(None, ["model_name=m", "loss_type=in_batch_hard", *overrides]).config
        loss = config.run_loss().build(config, LossCommon(torch.float64, 8, 16))
        assert isinstance(loss, InBatchHard)
        return loss

    assert [made().hard_topk, made("hard_topk=3").hard_topk, made("use_all_negatives=true").hard_topk] == [8, 3, None]
