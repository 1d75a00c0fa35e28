"""Batches: an epoch of rows by seed and step alone; without repeats, by class, hard, and of several sources."""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kit.rows import epoch_batches, table_of

from vembed.batch import Composed, Image, pictures_in
from vembed.config.schema import Config
from vembed.data.arrangements import (
    VECTOR_LENGTH,
    Arrangement,
    ByClass,
    Contents,
    HardBatches,
    WithoutRepeats,
    whole_numbers,
)
from vembed.data.sampler import GlobalSampler, Mixture, allot
from vembed.data.table import Record, RecordTable
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.training.data import build_sampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("num_records", "batch_size"), [(2, 1), (2, 5), (10, 5), (11, 5), (12, 5), (14, 5), (1000, 64), (3, 3), (4, 3)]
)
def test_every_record_comes_once_per_epoch_but_for_the_stated_tail(
    num_records: int, batch_size: int, drop_last: bool
) -> None:
    sampler = GlobalSampler(num_records, batch_size=batch_size, seed=3, drop_last=drop_last)
    tail = num_records % batch_size
    drops = num_records > batch_size and tail > 0 and (drop_last or tail == 1)
    for epoch in range(3):
        rows = np.concatenate(epoch_batches(sampler, epoch)).tolist()
        assert len(rows) == len(set(rows)) == num_records - tail * drops
        assert set(rows) <= set(range(num_records))


@pytest.mark.parametrize(
    ("num_records", "accumulated", "shares"),
    [
        (1010, 100, [*[0.01] * 100, 1.0]),  # 101 batches: the last step has one
        (34, 2, [0.5, 0.5, 10 / 14, 4 / 14]),
        (30, 1, [1.0, 1.0, 1.0]),
        (30, 7, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_the_shares_of_a_step_are_those_of_its_rows(num_records: int, accumulated: int, shares: list[float]) -> None:
    sampler = GlobalSampler(num_records, batch_size=10, seed=3)
    found = [sampler.share(number, accumulated) for number in range(2 * sampler.batches_per_epoch)]
    assert found == 2 * shares, "bit for bit"


def test_the_order_is_the_stated_generator() -> None:
    sampler = GlobalSampler(20, batch_size=4, seed=9)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([9, 2]))).permutation(20)
    assert np.concatenate(epoch_batches(sampler, 2)).tolist() == order.tolist()


@pytest.mark.parametrize(
    ("num_records", "drop_last", "steps", "words"),
    [
        *[(20, False, 5, None), (20, True, 5, None), (22, False, 6, "2 records instead of 4")],
        *[(22, True, 5, "last 2 records"), (21, False, 5, "one record has no in-batch negatives")],
        *[(3, False, 1, "fewer than a batch"), (3, True, 1, "fewer than a batch")],
    ],
)
def test_the_rule_that_applies_is_stated(num_records: int, drop_last: bool, steps: int, words: str | None) -> None:
    sampler = GlobalSampler(num_records, batch_size=4, seed=0, drop_last=drop_last)
    assert sampler.batches_per_epoch == steps
    assert len(sampler.notes) == (words is not None)
    assert words is None or words in sampler.notes[0]


@pytest.mark.parametrize("num_records", [0, 1])
def test_less_than_two_records_are_refused(num_records: int) -> None:
    with pytest.raises(DataError, match=f"the data has {num_records}"):
        GlobalSampler(num_records, batch_size=4, seed=0)
    assert GlobalSampler(2, batch_size=4, seed=0).rows(0).size == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *[("batch_size", {"batch_size": 0}), ("batch_size", {"batch_size": True})],
        *[("batch_size", {"batch_size": 2.0}), ("seed", {"seed": -1}), ("num_records", {"num_records": -1})],
    ],
)
def test_bad_arguments_are_named(name: str, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=name):
        GlobalSampler(**{"num_records": 10, "batch_size": 2, "seed": 0, **arguments})
    with pytest.raises(ValueError, match="step"):
        GlobalSampler(10, batch_size=2, seed=0).rows(-1)


NUMBERS = np.arange(523)
ARRANGEMENTS: dict[str, Arrangement | None] = {
    "at random": None,
    "without repeats": WithoutRepeats(
        Contents.of_pairs(np.tile(NUMBERS, 2), np.concatenate([NUMBERS, 523 + NUMBERS * 7 % 60]), 523)
    ),
    "by class": ByClass(NUMBERS * 11 % 40, 4),
    "hard": HardBatches(whole_numbers((NUMBERS[:, None] * np.arange(3, 11) % 61 - 30).astype(np.float32)), 0.95),
}
MIXTURE = Mixture(("a", "b"), (400, 123), (1.0, 2.0), temperature=2.0, single=True)
DIGESTS = {
    "at random": ("6c15b1b6b7e7", "192d2e2f9144"),
    "without repeats": ("bda43043a0e9", "5d84e0a97a2b"),
    "by class": ("07b92bdc89da", "70d156ca0300"),
    "hard": ("29beb01467ae", "b11bbeedcd67"),
}
"""Hashes of two epochs, without and with the mixture."""


def arranged(name: str, *, mixed: bool = False, seed: int = 5) -> GlobalSampler:
    mixture = MIXTURE if mixed else None
    return GlobalSampler(523, batch_size=16, seed=seed, arrangement=ARRANGEMENTS[name], mixture=mixture)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_rows_are_a_function_of_seed_and_step_alone_as_in_earlier_versions(name: str, mixed: bool) -> None:
    """A resumed run goes on with the batches that it would have had."""
    sampler, drawn = arranged(name, mixed=mixed), hashlib.sha256()
    batches = [rows for epoch in range(2) for rows in epoch_batches(sampler, epoch)]
    for rows in batches:
        drawn.update(rows.astype("<i8").tobytes() + b"|")
    assert drawn.hexdigest()[:12] == DIGESTS[name][mixed]
    other = arranged(name, mixed=mixed)
    backward = [other.rows(step).tolist() for step in reversed(range(len(batches)))]
    assert [rows.tolist() for rows in batches] == backward[::-1]
    assert {frozenset(rows.tolist()) for rows in batches[: len(batches) // 2]} != {
        frozenset(rows.tolist()) for rows in batches[len(batches) // 2 :]
    }, "epochs differ"
    assert arranged(name, mixed=mixed, seed=6).rows(0).tolist() != batches[0].tolist()
    with pytest.raises(ValueError, match="read-only"):
        batches[0][0] = 1
    assert batches[0].dtype == np.int64


# Arrangements


def contents_of(*columns: np.ndarray) -> Contents:
    """Give row i the content columns[..][i]; a negative number stands for one that no other row has."""
    num_rows = len(columns[0])
    own = 10**9 + np.arange(len(columns) * num_rows).reshape(len(columns), num_rows)
    ids = np.where(np.stack(columns) < 0, own, np.stack(columns))
    return Contents.of_pairs(np.tile(np.arange(num_rows), len(columns)), ids.reshape(-1), num_rows)


def without_repeats(contents: Contents, batch_size: int, seed: int = 1) -> GlobalSampler:
    num_rows = len(contents.starts) - 1
    return GlobalSampler(num_rows, batch_size=batch_size, seed=seed, arrangement=WithoutRepeats(contents))


def num_repeats(contents: Contents, rows: np.ndarray) -> int:
    held = [contents.numbers[contents.starts[row] : contents.starts[row + 1]] for row in rows]
    return sum(count - 1 for count in Counter(np.concatenate(held).tolist()).values())


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


@pytest.mark.parametrize(("num_rows", "drop_last"), [(23, True), (21, False)])
def test_what_no_batch_holds_anyway_is_not_left_out_for_the_arrangement(num_rows: int, drop_last: bool) -> None:
    different = WithoutRepeats(contents_of(np.full(num_rows, -1)))
    far = HardBatches(whole_numbers(np.eye(num_rows, dtype=np.float32)), cap=0.9)
    by_class = ByClass(np.arange(num_rows) // 2, 2)
    for arrangement, words in (
        (different, "twice in a batch."),
        (far, "similarity of 0.00."),
        (by_class, f"of {num_rows} rows."),
    ):
        sampler = GlobalSampler(num_rows, batch_size=10, seed=1, drop_last=drop_last, arrangement=arrangement)
        assert sampler.arrangement_notes()[0].endswith(words)


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
        table = table_of((f"q{row}", [f"d{row}"], (), label) for row, label in enumerate(labels))
        return build_sampler(Config(model_name="m", batch_size=8, batch_sampling="classes"), table, 8)

    with pytest.raises(DataError, match=r"about 12 of 13 batches would hold one class alone.* has 98 of 100 rows"):
        uneven(98, 2)
    sampler, classes = uneven(68, 16, 16), np.repeat(np.arange(3), [68, 16, 16])
    lone = sum(len(np.unique(classes[rows])) == 1 for rows in epoch_batches(sampler, 0))
    assert 0 < lone < 7
    assert f"{lone} of 13 batches of the first epoch hold one class alone" in sampler.arrangement_notes()[-1]
    assert not any("alone" in note for note in uneven(50, 50).arrangement_notes())


def test_a_configuration_chooses_the_arrangement() -> None:
    rows = [(f"q{number}", f"d{number % 10}", (), f"c{number % 8}") for number in range(80)]
    table, base = table_of((q, [d], n, c) for q, d, n, c in rows), {"model_name": "m", "batch_size": 8}
    unlike = build_sampler(Config(**base, batch_sampling="no_duplicates"), table, 8)
    assert all(len({rows[row][1] for row in batch}) == 8 for batch in epoch_batches(unlike, 0))
    of_classes = build_sampler(Config(**base, batch_sampling="classes"), table, 8)
    assert all(len({rows[row][3] for row in batch}) == 2 for batch in epoch_batches(of_classes, 0))
    assert build_sampler(Config(**base), table, 8).arrangement_notes() == ()


def test_batches_by_class_need_enough_classes() -> None:
    config = Config(model_name="m", batch_size=16, batch_sampling="classes")
    with pytest.raises(DataError, match=r"rows.jsonl:2: batch_sampling classes needs the class of every row"):
        build_sampler(config, table_of([("a", "b", (), "x"), ("c", "d")]), 16)
    with pytest.raises(DataError, match="holds 4 classes, and the data have 2; lower the batch size to 8, or raise"):
        build_sampler(config, table_of((f"q{row}", [f"d{row}"], (), f"c{row % 2}") for row in range(40)), 16)


# Hard batches: rows that lie close together share a batch, those that are too close don't


def clustered(num_rows: int, num_clusters: int, dimension: int, *, noise: float = 0.6) -> np.ndarray:
    generator = np.random.default_rng(num_rows)
    centres = generator.normal(size=(num_clusters, dimension)) / dimension**0.5
    own = generator.integers(num_clusters, size=num_rows)
    return (centres[own] + noise * generator.normal(size=(num_rows, dimension)) / dimension**0.5).astype(np.float32)


def hard_sampler(vectors: np.ndarray, batch_size: int, *, cap: float = 0.99) -> GlobalSampler:
    arrangement = HardBatches(whole_numbers(vectors), cap)
    return GlobalSampler(len(vectors), batch_size=batch_size, seed=3, arrangement=arrangement)


def nearest(vectors: np.ndarray, batches: list[np.ndarray]) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return float(np.mean([(unit[rows] @ unit[rows].T - 2 * np.eye(len(rows))).max(axis=1).mean() for rows in batches]))


def test_rows_of_a_batch_lie_closer_than_at_random_and_every_row_comes_once() -> None:
    vectors = clustered(1010, 50, 32)
    sampler = hard_sampler(vectors, 32)
    at_random = GlobalSampler(len(vectors), batch_size=32, seed=3)
    for epoch in range(2):
        batches = epoch_batches(sampler, epoch)
        assert sorted(map(len, batches)) == sorted(map(len, epoch_batches(at_random, epoch)))
        assert np.sort(np.concatenate(batches)).tolist() == list(range(len(vectors)))
        assert nearest(vectors, batches) > nearest(vectors, epoch_batches(at_random, epoch)) + 0.15
    first, second = ({frozenset(rows.tolist()) for rows in epoch_batches(sampler, epoch)} for epoch in range(2))
    assert not first & second


def test_rows_that_are_too_near_share_no_batch() -> None:
    vectors = np.repeat(clustered(200, 20, 16), 3, axis=0)  # each row and two copies of it
    copies = np.arange(600) // 3
    plain, capped = (epoch_batches(hard_sampler(vectors, 20, cap=cap), 0) for cap in (1.0, 0.98))
    assert sum(len(rows) - len(set(copies[rows])) for rows in plain) > 100
    assert all(len(rows) == len(set(copies[rows])) for rows in capped)
    kept = sum(map(len, capped))
    assert kept > 560
    [note] = hard_sampler(vectors, 20, cap=0.98).arrangement_notes()
    assert f"{600 - kept} row" in note or kept == 600


def test_rows_that_are_all_alike_still_make_batches_of_two() -> None:
    alike = without_repeats(contents_of(np.zeros(10, dtype=np.int64)), 4)
    assert [len(rows) for rows in epoch_batches(alike)] == [2, 2, 2]
    batches = epoch_batches(hard_sampler(np.ones((20, 4), dtype=np.float32), 5, cap=0.9), 0)
    assert [len(rows) for rows in batches] == [2] * 4


@pytest.mark.parametrize("dimension", [8, 384, 4096])
def test_products_of_two_vectors_and_of_a_direction_are_exact_in_any_order(dimension: int) -> None:
    """In float32 each sum of whole numbers below 2^24 is exact."""
    whole = whole_numbers(np.random.default_rng(0).normal(size=(64, dimension)).astype(np.float32))
    longest = np.sqrt((whole.astype(np.int64) ** 2).sum(axis=1)).max()
    assert 0.9 * VECTOR_LENGTH < longest < 1.1 * VECTOR_LENGTH
    assert 2 * longest * longest < 2**24
    directions = (whole[1:] - whole[:-1]).astype(np.float32)
    exact = whole.astype(np.int64) @ (whole[1:] - whole[:-1]).astype(np.int64).T
    assert np.array_equal(whole.astype(np.float32) @ directions.T, exact)


# Several sources: joined into one table, sharing epochs by weight, one batch of each or mixed


def source_table(name: str, num_rows: int = 5, **row: Any) -> RecordTable:
    writer = RecordWriter()
    for number in range(num_rows):
        own = {key: value[number] if isinstance(value, list) else value for key, value in row.items()}
        positives = own.pop("positives", [f"{name} document {number}"])
        writer.add(f"{name} query {number}", positives=positives, file=f"{name}.jsonl", line=number + 1, **own)
    return writer.finish()


def content(record: Record) -> tuple[object, ...]:
    pictures = [None if picture.data is None else bytes(picture.data) for picture in pictures_in([*record.positives])]
    return (record.query, record.positives, record.negatives, record.location, record.scores, pictures)


def test_joined_tables_hold_the_records_of_each_and_know_their_source(tmp_path: Path) -> None:
    (tmp_path / "file.png").write_bytes(b"of a file")
    files = [Image(f"{number}.png", f"bytes {number}".encode()) for number in range(4)]
    several = Composed((files[0], Image(str(tmp_path / "file.png")), Image("4.png", b"bytes 4")), "text")
    tables = [
        source_table("a", negatives=[[], ["a query 0", "n"], [], ["n"], []]),
        source_table("b", positives=[[each] for each in (*files, several)], label=7),
        source_table("c", scores=[(0.5,), (), (1.0,), (), ()]).subset([4, 2]),
        source_table("d", label=["x", None, "y", "7", "x"], positives=[[each] for each in (several, *files)]),
    ]
    joined = RecordTable.joined(tables)
    assert list(map(content, joined)) == [content(record) for table in tables for record in table]
    labels = [record.label for record in joined]
    assert labels == [*[None] * 5, *["1:7"] * 5, None, None, "3:x", None, "3:y", "3:7", "3:x"]
    assert joined.sources.tolist() == [0] * 5 + [1] * 5 + [2] * 2 + [3] * 5
    assert joined.subset([16, 0, 11]).sources.tolist() == [3, 0, 2]
    assert joined.take([11])[0].query == "c query 2"
    numbers = [table.items.ids[table.numbers("positives")[1]] for table in tables]
    assert np.array_equal(joined.items.ids[joined.numbers("positives")[1]], np.concatenate(numbers))
    assert tables[0].sources.tolist() == [0] * 5


def test_joined_tables_on_disk_stay_there_and_keep_their_fingerprint(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        writer = RecordWriter(folder=folder)
        for number in range(40):
            document = f"{folder.name} document {number} {'x' * 50_000}"
            writer.add(f"query {number}", positives=[document], file=f"{folder.name}.jsonl", line=number + 1)
        writer.finish()
    parts = [RecordTable.mapped(folder) for folder in folders]
    before = pa.total_allocated_bytes()
    joined = RecordTable.joined(parts)
    assert joined[41].positives == parts[1][1].positives
    assert pa.total_allocated_bytes() - before < 500_000, "of texts of 4 MB"
    assert joined.fingerprint == RecordTable.joined([part.subset(range(40)) for part in parts]).fingerprint
    assert joined.fingerprint != RecordTable.joined(parts[::-1]).fingerprint


def sampler_of(sizes: Sequence[int], weights: Sequence[float], batch_size: int, **more: Any) -> GlobalSampler:
    names = tuple(f"source{number}" for number in range(len(sizes)))
    mixture = Mixture(names, tuple(sizes), tuple(weights), **more)
    return GlobalSampler(sum(sizes), batch_size=batch_size, seed=5, mixture=mixture)


def source_counts(rows: np.ndarray, sizes: Sequence[int]) -> list[int]:
    return np.bincount(np.searchsorted(np.cumsum(sizes), rows, side="right"), minlength=len(sizes)).tolist()


def test_sources_of_equal_weight_come_once_an_epoch_each_row() -> None:
    sampler = sampler_of((30, 61, 9), (1, 1, 1), 10)
    for epoch in range(3):
        assert np.sort(np.concatenate(epoch_batches(sampler, epoch))).tolist() == list(range(100))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("weights", "temperature"), [((1, 1), 1.0), ((1, 3), 1.0), ((1, 1), 4.0), ((0.2, 1), 1e9)])
def test_an_epoch_has_the_shares_asked_for_and_no_row_comes_again_before_all_others(
    weights: tuple[float, float], temperature: float, single: bool
) -> None:
    sizes = (300, 100)
    sampler = sampler_of(sizes, weights, 10, temperature=temperature, single=single)
    raw = [weight * size ** (1 / temperature) for weight, size in zip(weights, sizes, strict=True)]
    wanted = [400 * each / sum(raw) for each in raw]
    uses = np.zeros(400, dtype=np.int64)
    for epoch in range(7):
        batches = epoch_batches(sampler, epoch)
        counts = source_counts(np.concatenate(batches), sizes)
        assert sum(counts) == 400
        assert np.abs(np.subtract(counts, wanted)).max() <= (10 if single else 1)
        assert all(len(set(batch.tolist())) > 5 for batch in batches)
        if single:
            assert all(max(source_counts(batch, sizes)) == 10 for batch in batches)
        np.add.at(uses, np.concatenate(batches), 1)
        for part in (uses[:300], uses[300:]):
            assert part.max() - part.min() <= 1


def test_the_smaller_last_batch_of_single_sources_is_of_the_largest() -> None:
    sizes = (35, 12)
    sampler = sampler_of(sizes, (1, 1), 10, single=True)
    counts = [source_counts(batch, sizes) for batch in epoch_batches(sampler, 0)]
    assert sorted(counts) == [[0, 10], [7, 0], [10, 0], [10, 0], [10, 0]]
    assert counts != [source_counts(batch, sizes) for batch in epoch_batches(sampler, 1)]


def test_the_plan_says_what_each_source_gives() -> None:
    mixed, single = (sampler_of((300, 100), (1, 3), 10, single=each).arrangement_notes() for each in (False, True))
    assert "source0: 300 rows, weight 1: 200 rows of an epoch, each 0.67 times" in mixed[0]
    assert "200 rows of an epoch in 20 of 40 batches, each 2.00 times" in single[1]


@pytest.mark.parametrize(
    ("sizes", "words"), [((300, 9), "source1 has 9 rows to train on, fewer than a batch of 10"), ((5, 6), "has none")]
)
def test_sources_too_small_for_batches_of_their_own_are_refused(sizes: tuple[int, int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        sampler_of(sizes, (1, 1), 10, single=True)


def test_every_source_has_a_part_whatever_its_share() -> None:
    assert allot(np.array([0.999, 0.0005, 0.0005]), 10).tolist() == [8, 1, 1]
    assert allot(np.array([0.5, 0.5]), 5).sum() == 5


def test_a_temperature_near_zero_leaves_the_epoch_to_the_largest_source() -> None:
    mixture = Mixture(("a", "b", "c"), (10**6, 10**6, 1000), (1, 3, 1), temperature=0.01)
    assert mixture.shares.tolist() == [0.25, 0.75, 0]


def test_arrangements_and_sources_go_together() -> None:
    tables = [
        source_table("a", 40, label=[number % 8 for number in range(40)]),
        source_table("b", 80, label=[0, 1, 2, 3] * 20),
    ]
    records = RecordTable.joined(tables)
    base = {"model_name": "m", "data": [{"path": "a", "weight": 3}, {"path": "b"}], "batch_size": 8}
    keys = {**base, "source_batches": "single", "batch_sampling": "classes"}
    sampler = build_sampler(Config.model_validate(keys), records, 8)
    labels = np.array([record.label for record in records])
    for batch in epoch_batches(sampler, 0):
        assert len(set(labels[batch])) == 2
        assert len({label.partition(":")[0] for label in labels[batch]}) == 1
    few = RecordTable.joined([tables[0], source_table("b", 80, label=["one class"] * 80)])
    with pytest.raises(DataError, match="holds 2 classes, and the smallest of the sources has 1"):
        build_sampler(Config.model_validate(keys), few, 8)
    sampler = build_sampler(Config.model_validate({**base, "batch_sampling": "no_duplicates"}), records, 8)
    assert all(len(set(batch.tolist())) == len(batch) for batch in epoch_batches(sampler, 0))
    assert sum(map(len, epoch_batches(sampler, 0))) == 120
