from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vembed.config.schema import Config
from vembed.data.arrangements import ByClass, Contents, WithoutRepeats
from vembed.data.sampler import GlobalSampler
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.training.data import build_sampler

if TYPE_CHECKING:
    from vembed.data.table import RecordTable


def contents_of(*columns: np.ndarray) -> Contents:
    """Give row i the content columns[..][i]; a negative number stands for one that no other row has."""
    num_rows = len(columns[0])
    own = 10**9 + np.arange(len(columns) * num_rows).reshape(len(columns), num_rows)
    ids = np.where(np.stack(columns) < 0, own, np.stack(columns))
    return Contents.of_pairs(np.tile(np.arange(num_rows), len(columns)), ids.reshape(-1), num_rows)


def without_repeats(contents: Contents, batch_size: int, seed: int = 1) -> GlobalSampler:
    num_rows = len(contents.starts) - 1
    return GlobalSampler(num_rows, batch_size=batch_size, seed=seed, arrangement=WithoutRepeats(contents))


def epoch_batches(sampler: GlobalSampler, epoch: int) -> list[np.ndarray]:
    first = epoch * sampler.batches_per_epoch
    return [sampler.rows(step) for step in range(first, first + sampler.batches_per_epoch)]


def num_repeats(contents: Contents, rows: np.ndarray) -> int:
    held = [contents.numbers[contents.starts[row] : contents.starts[row + 1]] for row in rows]
    return sum(count - 1 for count in Counter(np.concatenate(held).tolist()).values())


def table_of(rows: list[tuple[str, str, str | None]]) -> RecordTable:
    writer = RecordWriter()
    for line, (query, positive, label) in enumerate(rows, start=1):
        writer.add(query, positives=[positive], label=label, file="rows.jsonl", line=line)
    return writer.finish()


@pytest.mark.parametrize(("num_rows", "num_pages", "batch_size"), [(809, 300, 64), (1000, 60, 30), (99, 20, 8)])
def test_no_content_comes_twice_in_a_batch_and_every_row_comes_once(
    num_rows: int, num_pages: int, batch_size: int
) -> None:
    generator = np.random.default_rng(num_rows)
    queries = np.where(generator.random(num_rows) < 0.1, generator.integers(num_rows, size=num_rows) + 10**6, -1)
    contents = contents_of(queries, generator.integers(num_pages, size=num_rows))
    sampler = without_repeats(contents, batch_size)
    at_random = GlobalSampler(num_rows, batch_size=batch_size, seed=1)
    assert sum(num_repeats(contents, rows) for rows in epoch_batches(at_random, 0)) > 5
    assert sampler.batches_per_epoch == at_random.batches_per_epoch
    for epoch in range(3):
        batches = epoch_batches(sampler, epoch)
        assert [num_repeats(contents, rows) for rows in batches] == [0] * len(batches)
        assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(num_rows))
        assert [len(rows) for rows in batches] == [len(rows) for rows in epoch_batches(at_random, epoch)]


def test_a_content_that_fills_every_batch_is_spread_over_all_of_them() -> None:
    contents = contents_of(np.repeat([7, -1], [10, 90]))
    batches = epoch_batches(without_repeats(contents, 10), 0)
    assert [int((rows < 10).sum()) for rows in batches] == [1] * 10


def test_rows_that_fit_in_no_batch_are_left_out_anew_in_each_epoch() -> None:
    contents = contents_of(np.repeat([7, -1], [40, 60]))  # 10 batches hold 10 of the 40
    sampler = without_repeats(contents, 10)
    kept = [np.concatenate(epoch_batches(sampler, epoch)) for epoch in range(2)]
    assert [len(rows) for rows in kept] == [70, 70]
    assert set(kept[0].tolist()) != set(kept[1].tolist())
    (note,) = sampler.arrangement_notes()
    assert note.endswith("comes twice in a batch; the first epoch leaves 30 rows out for it.")


def test_rows_that_are_all_alike_still_make_batches_of_two() -> None:
    batches = epoch_batches(without_repeats(contents_of(np.zeros(10, dtype=np.int64)), 4), 0)
    assert [len(rows) for rows in batches] == [2, 2, 2]


def test_rows_are_a_function_of_seed_and_step_alone() -> None:
    contents = contents_of(np.random.default_rng(0).integers(40, size=300))
    one, other = without_repeats(contents, 16), without_repeats(contents, 16)
    forward = [one.rows(step).tolist() for step in range(60)]
    assert [other.rows(step).tolist() for step in reversed(range(60))] == forward[::-1]
    assert without_repeats(contents, 16, seed=2).rows(0).tolist() != forward[0]
    with pytest.raises(ValueError, match="read-only"):
        one.rows(0)[0] = 1


@pytest.mark.slow
def test_a_million_rows_are_arranged_in_seconds() -> None:
    contents = contents_of(
        np.full(1_000_000, -1), np.random.default_rng(0).integers(50_000, size=1_000_000)
    )  # 20 rows a page
    sampler, start = without_repeats(contents, 1024), time.process_time()
    assert num_repeats(contents, sampler.rows(500)) == 0
    assert time.process_time() - start < 15


@pytest.mark.parametrize(("num_classes", "batch_size", "each"), [(30, 32, 4), (8, 32, 4), (100, 24, 2)])
def test_a_batch_holds_as_many_rows_of_each_of_its_classes(num_classes: int, batch_size: int, each: int) -> None:
    classes = np.random.default_rng(each).permutation(np.arange(576) % num_classes)
    sampler = GlobalSampler(576, batch_size=batch_size, seed=1, arrangement=ByClass(classes, each))
    assert sampler.batches_per_epoch == -(-576 // batch_size)
    seen: Counter[int] = Counter()
    for epoch in range(8):
        for rows in epoch_batches(sampler, epoch):
            counts = Counter(classes[rows].tolist())
            assert len(rows) == len(set(rows.tolist()))
            assert set(counts.values()) == {each}
            assert len(counts) == batch_size // each
            seen.update(rows.tolist())
    assert len(seen) == 576
    assert max(seen.values()) <= 16  # a group is filled up with rows of the same epoch: at most twice each


def test_a_class_with_fewer_rows_comes_with_all_of_them() -> None:
    classes = np.repeat(np.arange(40), [2] * 20 + [4] * 20)
    sampler = GlobalSampler(120, batch_size=16, seed=1, arrangement=ByClass(classes, 4))
    sizes = {
        (int(number), count) for rows in epoch_batches(sampler, 0) for number, count in Counter(classes[rows]).items()
    }
    assert sizes <= {(number, 2 if number < 20 else 4) for number in range(40)}
    assert "20 classes with fewer rows than that: all of them come." in sampler.arrangement_notes()


def test_a_class_of_more_groups_than_batches_meets_itself_in_none() -> None:
    classes = np.concatenate([np.zeros(200, dtype=np.int64), np.arange(1, 101).repeat(2)])
    sampler = GlobalSampler(len(classes), batch_size=20, seed=1, arrangement=ByClass(classes, 4))
    for epoch in range(2):
        batches = [classes[rows] for rows in epoch_batches(sampler, epoch)]
        assert max(np.bincount(batch).max() for batch in batches) == 4
        assert sum((batch == 0).any() for batch in batches) == len(batches), "its groups fill all of them"


def test_batches_of_one_class_are_counted_and_refused_where_most_are_such() -> None:
    def uneven(*sizes: int) -> GlobalSampler:
        labels = [f"c{number}" for number, size in enumerate(sizes) for _ in range(size)]
        table = table_of([(f"q{row}", f"d{row}", label) for row, label in enumerate(labels)])
        return build_sampler(Config(model_name="m", batch_size=8, batch_sampling="classes"), table, 8)

    with pytest.raises(DataError, match=r"about 12 of 13 batches would hold one class alone.* has 98 of 100 rows"):
        uneven(98, 2)
    sampler, classes = uneven(68, 16, 16), np.repeat(np.arange(3), [68, 16, 16])
    lone = sum(len(np.unique(classes[rows])) == 1 for rows in epoch_batches(sampler, 0))
    assert 0 < lone < 7
    assert f"{lone} of 13 batches of the first epoch hold one class alone" in sampler.arrangement_notes()[-1]
    assert not any("alone" in note for note in uneven(50, 50).arrangement_notes())


def test_a_configuration_chooses_the_arrangement() -> None:
    rows = [(f"q{number}", f"d{number % 10}", f"c{number % 8}") for number in range(80)]
    table, base = table_of(rows), {"model_name": "m", "batch_size": 8}
    unlike = build_sampler(Config(**base, batch_sampling="no_duplicates"), table, 8)
    assert all(len({rows[row][1] for row in batch}) == 8 for batch in epoch_batches(unlike, 0))
    of_classes = build_sampler(Config(**base, batch_sampling="classes"), table, 8)
    assert all(len({rows[row][2] for row in batch}) == 2 for batch in epoch_batches(of_classes, 0))
    assert build_sampler(Config(**base), table, 8).arrangement_notes() == ()


def test_batches_by_class_need_enough_classes() -> None:
    config = Config(model_name="m", batch_size=16, batch_sampling="classes")
    with pytest.raises(DataError, match=r"rows.jsonl:2: batch_sampling classes needs the class of every row"):
        build_sampler(config, table_of([("a", "b", "x"), ("c", "d", None)]), 16)
    with pytest.raises(DataError, match="holds 4 classes, and the data have 2; lower the batch size to 8, or raise"):
        build_sampler(config, table_of([(f"q{row}", f"d{row}", f"c{row % 2}") for row in range(40)]), 16)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"batch_size": 10}, "set batch_size to 8"),
        ({"batch_size": 4}, "set batch_size to 8"),
        ({"global_batch_size": 30}, "set global_batch_size to 32"),
        ({"batch_size": "auto", "samples_per_class": 3}, "a power of two"),
        ({"label_kind": "pair", "loss_type": "cosent"}, "set it to class"),
    ],
)
def test_keys_that_make_no_batch_of_classes_are_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(**{"model_name": "m", "batch_sampling": "classes", **keys})
