from __future__ import annotations

import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vembed.batch import MODALITY_WORDS, Composed, Image, content_id, modality_of
from vembed.data.columns import WEIGHT_COLUMN, ExtraColumn
from vembed.data.table import BLOCK_ROWS, ItemColumn, Record, RecordTable
from vembed.data.table_writer import ItemWriter, Numbering, RecordWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.batch import Item


def make_table(
    rows: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], str | int | None]], file: str = "a.jsonl"
) -> RecordTable:
    writer = RecordWriter()
    for line, (query, positives, negatives, label) in enumerate(rows, start=1):
        writer.add(query, positives=positives, negatives=negatives, label=label, file=file, line=line)
    return writer.finish()


ROWS: list[tuple[str, tuple[str, ...], tuple[str, ...], str | int | None]] = [
    ("q0", ("p0",), (), None),
    ("q1 é\n", ("p1", "p1b"), ("n1",), 7),
    ("q2", ("p2",), ("n2", "n2b", "n2c"), "class"),
]


def test_records_come_back_as_they_went_in() -> None:
    table = make_table(ROWS)
    assert len(table) == 3
    assert [table[i] for i in range(3)] == [Record(*row, f"a.jsonl:{i + 1}") for i, row in enumerate(ROWS)]
    assert list(table) == table.take([0, 1, 2])
    assert table[-1] == table[2]
    assert isinstance(table[1].label, int)
    assert isinstance(table[2].label, str)


def test_take_keeps_the_order_asked_for_and_repeats() -> None:
    table = make_table(ROWS)
    assert [record.query for record in table.take([2, 0, 2])] == ["q2", "q0", "q2"]
    assert table.take([]) == []


HARD_TEXTS = ["plain", 'a "quote"', "back\\slash", "tab\t", "del\x7f", "ü", "\U0001f600", " ", "", "a\u2028b", "~ }!"]


def slow_fingerprint(table: RecordTable) -> str:
    """Hash the content ids and numbers of records one by one, as `RecordTable.fingerprint` says it hashes columns."""
    records, digest = list(table), hashlib.sha256(b"vembed records 2")
    digest.update(np.array([content_id(record.query) for record in records], dtype="<i8").tobytes())
    for column in ([record.positives for record in records], [record.negatives for record in records]):
        digest.update(np.array([len(items) for items in column], dtype="<i8").tobytes())
        digest.update(np.array([content_id(item) for items in column for item in items], dtype="<i8").tobytes())
    columns: dict[str, list[Any]] = {
        "label": [None if record.label is None else json.dumps(record.label) for record in records],
        "scores": [list(record.scores) or None for record in records],
        **{f"loss:{name}": [record.columns[name] for record in records] for name in sorted(records[0].columns)},
    }
    for name, cells in columns.items():
        if set(map(str, cells)) - {"None"} and not (name == "loss:weight" and set(cells) == {1.0}):
            digest.update(json.dumps([name, cells]).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("weights", [None, [1.0, 1.0], [1.0, 0.5]])
@pytest.mark.parametrize("label", [None, 7, 'a "class" é'])
def test_the_fingerprint_hashes_what_each_row_holds(label: str | int | None, weights: list[float] | None) -> None:
    writer = RecordWriter([] if weights is None else [WEIGHT_COLUMN])
    for number, text in enumerate(HARD_TEXTS):
        documents, columns = [text, *HARD_TEXTS[:number]], {} if weights is None else {"weight": weights[number % 2]}
        writer.add(
            text,
            positives=documents[: number % 3],
            negatives=documents[number % 3 :] * (number % 2),
            label=None if number == 3 else label,
            scores=[0.25] * (number // 8),
            columns=columns,
            file="f",
            line=number,
        )
    table = writer.finish()
    assert table.fingerprint == slow_fingerprint(table)
    part = table.subset([3, 1, 4])
    assert part.fingerprint == slow_fingerprint(part) != table.fingerprint
    assert table.items.ids.tolist() == [content_id(text) for text in HARD_TEXTS]


@pytest.mark.parametrize("index", [3, -4])
def test_a_position_outside_is_an_index_error(index: int) -> None:
    table = make_table(ROWS)
    with pytest.raises(IndexError):
        table[index]
    with pytest.raises(IndexError):
        table.take([0, index])
    with pytest.raises(IndexError):
        table.subset([index])
    assert table[2].query == "q2"


def test_subset_of_a_subset_counts_in_the_subset() -> None:
    table = make_table(ROWS)
    part = table.subset([2, 0])
    assert [record.query for record in part] == ["q2", "q0"]
    assert [record.query for record in part.subset([1])] == ["q0"]
    assert len(part) == 2
    with pytest.raises(IndexError):
        part[2]


def test_records_survive_the_borders_of_blocks() -> None:
    count = BLOCK_ROWS * 2 + 3
    table = make_table([(f"q{i}", (f"p{i}",), (f"n{i}",) * (i % 3), i % 5 or None) for i in range(count)])
    assert len(table) == count
    for i in (0, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS * 2, count - 1):
        assert table[i] == Record(f"q{i}", (f"p{i}",), (f"n{i}",) * (i % 3), i % 5 or None, f"a.jsonl:{i + 1}")
    assert [record.query for record in table] == [f"q{i}" for i in range(count)]


def test_fingerprint_is_of_content_not_of_location() -> None:
    assert make_table(ROWS).fingerprint == make_table(ROWS, file="elsewhere.jsonl").fingerprint
    assert make_table(ROWS).subset([0, 1]).fingerprint == make_table(ROWS[:2]).fingerprint


def test_fingerprint_changes_with_order_and_every_field() -> None:
    variants = [
        ROWS,
        ROWS[::-1],
        ROWS[:2],
        [("q0!", *ROWS[0][1:]), *ROWS[1:]],
        [("q0", ("p0", "more"), (), None), *ROWS[1:]],
        [("q0", ("p0",), ("more",), None), *ROWS[1:]],
        [("q0", ("p0",), (), 0), *ROWS[1:]],
        [("q0", ("p0",), (), "0"), *ROWS[1:]],
    ]
    prints = {make_table(rows).fingerprint for rows in variants}
    assert len(prints) == len(variants)
    assert all(len(value) == 64 for value in prints)


def test_an_empty_table_has_no_records() -> None:
    table = make_table([])
    assert len(table) == 0
    assert list(table) == []


def test_a_document_of_many_rows_is_stored_once() -> None:
    count = BLOCK_ROWS * 3 + 1
    documents = [f"document {i} " * 50 for i in range(7)]
    rows = [(f"q{i % 100}", (documents[i % 7],), (documents[(i + 3) % 7],), None) for i in range(count)]
    table = make_table(rows)
    assert len(table.items) == 107
    assert [(record.query, record.positives, record.negatives) for record in table] == [row[:3] for row in rows]


def test_items_are_numbered_as_they_first_occur_however_many_there_are() -> None:
    writer, drawn = ItemWriter(), random.Random(0).choices(range(60_000), k=60_000)
    of: dict[str, int] = {}
    for start in range(0, len(drawn), 7000):
        items = [f"item {number}" for number in drawn[start : start + 7000]]
        assert writer.numbers(items).tolist() == [of.setdefault(item, len(of)) for item in items]
    items = writer.finish()
    assert items.at(np.arange(len(items))) == list(of)
    assert len(of) > 2 * BLOCK_ROWS, "the table of what is known must grow"


def test_keys_that_share_a_slot_keep_their_own_numbers() -> None:
    keys = np.concatenate([np.arange(300, dtype=np.int64) << 40, np.array([-1, 0, -1, 5 << 40])])  # low bits all 0
    of: dict[int, int] = {}
    numbers, new = Numbering().numbers(keys)
    assert numbers.tolist() == [of.setdefault(key, len(of)) for key in keys.tolist()]
    assert keys[new].tolist() == list(of)


def test_texts_paths_and_bytes_that_look_alike_are_different_items() -> None:
    items = ("a", Image("a"), Image("a", b"1"), Image("b", b"1"), Image("a", b"2"), Composed((Image("a"),), "a"))
    items = (*items, Composed((Image("a", b"1"),), "a"), Composed((Image("a"),), "b"), "b", Image("b"), "\0pa")
    writer = RecordWriter()
    for line in range(3):
        writer.add(items[line], positives=items, negatives=items[::-1], file="f", line=line)
    table = writer.finish()
    assert len(table.items) == len(items)
    assert table.items.num_blobs == 2
    for line, record in enumerate(table):
        assert (record.query, record.positives, record.negatives) == (items[line], items, items[::-1])


def graded_table(rows: list[tuple[tuple[float, ...], float, int]]) -> RecordTable:
    writer = RecordWriter([ExtraColumn("line", "weight"), ExtraColumn("topic", "number of the topic", kind="int")])
    for line, (scores, weight, topic) in enumerate(rows):
        columns = {"line": weight, "topic": topic}
        writer.add("q", positives=["p"], negatives=["n"], scores=scores, columns=columns, file="f", line=line)
    return writer.finish()


def test_scores_and_the_columns_of_a_loss_come_back() -> None:
    rows: list[tuple[tuple[float, ...], float, int]] = [((1.0, 0.25), 0.5, 3), ((), -1.0, 2**40), ((0.0, 0.0), 0.0, 0)]
    table = graded_table(rows)
    for chosen in ([0, 1, 2], [2, 0]):
        found = table.subset(chosen)
        assert [(record.scores, dict(record.columns)) for record in found] == [
            (rows[row][0], {"line": rows[row][1], "topic": rows[row][2]}) for row in chosen
        ]
    assert all(type(record.columns["topic"]) is int for record in table)
    changed = [
        graded_table([(scores, weight, topic), *rows[1:]])
        for scores, weight, topic in (((1.0, 0.5), 0.5, 3), ((), 0.5, 3), ((1.0, 0.25), 0.6, 3), ((1.0, 0.25), 0.5, 4))
    ]
    assert len({each.fingerprint for each in (table, *changed)}) == 5


def test_items_have_the_ids_and_modalities_of_their_content() -> None:
    picture = Image("a.png", b"bytes of a picture")
    items = ["q", " q ", picture, Composed((picture,), "and a text"), Composed((picture, picture), "")]
    writer = RecordWriter()
    for line, item in enumerate(items, start=1):
        writer.add(item, positives=["p", item], negatives=[f"n{line}"] * (line % 2), file="a", line=line)
    for table in (writer.finish(), make_table(ROWS)):
        part = table.subset(range(1, len(table)))
        records = list(part)
        found: dict[ItemColumn, list[tuple[int, Item]]] = {
            "query": [(row, record.query) for row, record in enumerate(records)],
            "positives": [(row, item) for row, record in enumerate(records) for item in record.positives],
            "negatives": [(row, item) for row, record in enumerate(records) for item in record.negatives],
        }
        names = list(MODALITY_WORDS)
        for column, expected in found.items():
            rows, numbers = part.numbers(column)
            assert list(zip(rows.tolist(), part.items.at(numbers), strict=True)) == expected
            assert part.items.ids[numbers].tolist() == [content_id(item) for _, item in expected]
            assert [names[code] for code in part.items.modalities[numbers]] == [
                modality_of(item) for _, item in expected
            ]
