"""Every rank knows the whole batch and makes features of its own rows: together each row once, none of them twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from test_batch_loading import source_of, write_rows

from vembed.batch import Augmentation, Composed, Image
from vembed.data.collate import collate
from vembed.data.table import Record
from vembed.losses.base import BatchStructure
from vembed.losses.cells import false_negative_mask, positive_mask
from vembed.training.batches import assign_rows, count_masked, estimated_costs
from vembed.training.loop import batch_seed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.batch import Features, Item, Side
    from vembed.training.batches import BatchSource, FeaturedBatch


@pytest.fixture
def source(tmp_path: Path) -> BatchSource:
    return source_of(write_rows(tmp_path), augmentation=Augmentation("none", flip=False, seed=0))


def of_ranks(source: BatchSource, world_size: int, step: int) -> list[FeaturedBatch]:
    return [replace(source, rank=rank, world_size=world_size).batch(step) for rank in range(world_size)]


def num_rows(featured: FeaturedBatch) -> int:
    return featured.structure.num_queries + featured.structure.num_documents


def real_slots(featured: FeaturedBatch) -> list[int]:
    return [int(slot) for _, slots in featured.parts for slot in slots if slot >= 0]


def pictures(featured: FeaturedBatch) -> dict[int, np.ndarray]:
    """Return slot -> pixels."""
    found = {}
    for features, slots in featured.parts:
        for values in features.per_row.values():
            found |= {int(slot): row for slot, row in zip(slots, values, strict=True) if slot >= 0}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_make_each_row_of_the_same_batch_once(source: BatchSource, world_size: int) -> None:
    alone, shared = source.batch(0), of_ranks(source, world_size, 0)
    assert sorted(slot for each in shared for slot in real_slots(each)) == list(range(num_rows(alone)))
    for rank, each in enumerate(shared):
        assert each.record_ids == alone.record_ids
        assert [own.tolist() for own in each.assignment.slots] == [own.tolist() for own in shared[0].assignment.slots]
        assert sorted(real_slots(each)) == each.assignment.slots[rank].tolist()
    expected, found = pictures(alone), [item for each in shared for item in pictures(each).items()]
    assert len(found) == len(expected) > 0
    assert all(np.array_equal(pixels, expected[slot]) for slot, pixels in found)


def test_each_rank_reads_its_own_rows_alone(source: BatchSource, monkeypatch: pytest.MonkeyPatch) -> None:
    featurize, counts = type(source.encoder).featurize, [0] * 4

    def counted(encoder: Any, items: Sequence[Item], side: Side) -> Features:
        counts[rank] += len(items)
        return featurize(encoder, items, side)

    monkeypatch.setattr(type(source.encoder), "featurize", counted)
    for rank in range(4):
        featured = replace(source, rank=rank, world_size=4).batch(0)
    assert sum(counts) == num_rows(featured) >= 8
    assert max(counts) - min(counts) <= 1


def test_a_rank_without_a_row_of_a_modality_gets_a_spare_one_so_that_all_call_every_tower(source: BatchSource) -> None:
    shared = of_ranks(source, 3, 2)
    assert shared[0].structure.num_queries == 2, "captions for three ranks"
    assert all(len(each.parts) == 2 for each in shared)
    spares = [slots.tolist() for each in shared for _, slots in each.parts if (slots < 0).any()]
    assert spares == [[-1]] * len(spares)
    assert spares
    assert all(len(features) == len(slots) for each in shared for features, slots in each.parts)
    num_cut = 0
    for each in shared:
        cut = tuple((replace(features, num_truncated=len(slots)), slots) for features, slots in each.parts)
        num_cut += replace(each, parts=cut).num_truncated
    assert num_cut == num_rows(shared[0]), "a spare row is not counted a second time"


def test_no_two_ranks_and_no_two_batches_draw_the_same_random_numbers() -> None:
    """A CPU's generator looks at the lower half of a seed alone."""
    drawn = set()
    for rank in (0, 1, 2, 7, 8, 63, 1999):
        for number in (0, 1, 1000):
            torch.manual_seed(batch_seed(2**32 - 1, number, rank=rank))
            drawn.add(tuple(torch.rand(4).tolist()))
    assert len(drawn) == 7 * 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [(40,), (7, 5), (1, 1), (3, 0, 64)])
def test_every_row_is_dealt_once_and_counts_differ_by_one_at_most(sizes: tuple[int, ...], world_size: int) -> None:
    rows = np.random.default_rng(0).permutation(sum(sizes))
    groups = [np.sort(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    assignment = assign_rows(groups, np.random.default_rng(1).integers(1, 100, len(rows)), world_size)
    assert sorted(assignment.rank_order.tolist()) == list(range(len(rows)))
    assert all((np.diff(own) > 0).all() for own in assignment.slots)
    for group in (rows, *groups):
        counts = [np.isin(own, group).sum() for own in assignment.slots]
        assert max(counts) - min(counts) <= 1


def test_long_rows_are_spread_so_that_no_rank_waits_for_another() -> None:
    costs = np.minimum(np.random.default_rng(0).lognormal(5, 1.0, 512), 1024).astype(np.int64)
    assignment = assign_rows([np.arange(512)], costs, 8)
    shares = np.array([costs[own].sum() for own in assignment.slots])
    in_order = np.array([part.sum() for part in np.split(costs, 8)])
    assert shares.max() / shares.mean() < 1.03
    assert in_order.max() / in_order.mean() > 1.15, "dealt in the order of the data they would not be"


def test_a_text_costs_as_far_as_it_is_read_and_pictures_cost_alike() -> None:
    assert estimated_costs(["ab", "x" * 1000], max_length=8).tolist() == [2, 32]
    assert estimated_costs(["ab", "x" * 1000], max_length=None).tolist() == [2, 1000]
    first, second = Image("a.png"), Image("b.png")
    costs = estimated_costs([first, second, Composed((first,), "red")], max_length=8).tolist()
    assert (costs[0], costs[2]) == (costs[1], 3)


Row = tuple[str, tuple[str, ...], tuple[str, ...]]


def masked(rows: Sequence[Row], labels: Sequence[int | None]) -> int:
    """Return the number of pairs that the mask of the loss marks, once it is the one that is counted."""
    records = [Record(*row, label, "rows.jsonl:1") for row, label in zip(rows, labels, strict=True)]
    batch = collate(records, range(len(records)))
    structure = BatchStructure.of(batch)
    marked = int(false_negative_mask(structure, positive_mask(structure)).sum())
    assert count_masked(batch) == marked
    return marked


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(f"q{n}", (f"d{n}",), ()) for n in range(4)], 0),
        ([("a", ("same",), ()), ("b", ("same",), ()), ("c", ("other",), ())], 2),
        ([("a", ("x",), ("b",)), ("a", ("y",), ()), ("b", ("z",), ())], 3),  # x and y for the other a, b for b
    ],
)
def test_copies_of_positives_and_of_the_query_are_counted_as_masked(rows: Sequence[Row], expected: int) -> None:
    assert masked(rows, [None] * len(rows)) == expected


def test_rows_of_one_class_are_positives_and_arent_counted() -> None:
    masked([(f"q{n}", (f"d{n % 3}",), ()) for n in range(6)], [n % 2 for n in range(6)])


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_is_counted_as_the_mask_says(seed: int) -> None:
    draw = np.random.default_rng(seed)
    words = [f"w{n}" for n in range(int(draw.integers(3, 30)))]

    def some(most: int) -> tuple[str, ...]:
        return tuple(draw.choice(words, size=int(draw.integers(0, most + 1))).tolist())

    rows = [(str(draw.choice(words)), some(2) or ("x",), some(3)) for _ in range(int(draw.integers(5, 25)))]
    masked(rows, [None] * len(rows))
    assert masked([(query, ("x",), ()) for query, *_ in rows], [None] * len(rows)) > 0
