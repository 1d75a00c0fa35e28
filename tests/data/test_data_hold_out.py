import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from kit.rows import table_of

from vembed.batch import content_id
from vembed.data.hold_out import held_out_task, hold_out, resolution_notes
from vembed.data.table import RecordTable
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError

Row = tuple[str, tuple[str, ...]]


def pairs_of(rows: Iterable[Row]) -> RecordTable:
    return table_of((query, positives, ("shared negative",)) for query, positives in rows)


def plain_pairs(count: int) -> RecordTable:
    return pairs_of((f"q{i}", (f"p{i}",)) for i in range(count))


def tangled_rows(count: int = 2000) -> list[Row]:
    """Rows a third of which share a query or a positive with others, in chains, with white space that doesn't count."""
    rng = random.Random(1)
    rows: list[Row] = []
    for i in range(count):
        query = f"query {rng.randrange(count) if i % 3 == 0 else i}"
        positives = [f"answer {i}" + " " * (i % 2)]
        if i % 4 == 0:
            positives.append(f" answer {rng.randrange(count)}")
        rows.append((query, tuple(positives)))
    return rows


def texts(table: RecordTable, rows: Sequence[int]) -> set[str]:
    return {text.strip() for record in table.take(rows) for text in (record.query, *record.positives)}


def test_no_query_or_positive_is_on_both_sides() -> None:
    table = pairs_of(tangled_rows())
    train_rows, held_out_rows, notes = hold_out(table)
    shared = [text for record in table for text in {record.query, *(text.strip() for text in record.positives)}]
    assert len(shared) > len(set(shared)), "the rows must share texts for this test to mean anything"
    assert not texts(table, train_rows.tolist()) & texts(table, held_out_rows.tolist())
    assert notes[0].endswith("; no query or positive is on both sides."), "the hard negative is"
    train, held = train_rows.tolist(), held_out_rows.tolist()
    assert (train, held) == (sorted(train), sorted(held))
    assert sorted(train + held) == list(range(2000))
    assert 0 < len(held) <= 100


def test_queries_that_differ_in_case_spaces_and_punctuation_alone_stay_together() -> None:
    spellings = (
        "What is thing {}?",
        "what is  thing {}",
        "WHAT IS THING {}",
        "Was ist \u00dcbung {}?",
        "was ist \u00fcbung {}",
    )
    rows = [
        (spelling.format(i), (f"answer {number} {i}",)) for number, spelling in enumerate(spellings) for i in range(99)
    ]
    table = pairs_of(rows)
    train_rows, held_out_rows, _ = hold_out(table)
    sides = ({(row // 297, row % 99) for row in side.tolist()} for side in (train_rows, held_out_rows))
    assert not set.intersection(*sides)
    assert len(held_out_rows) == 99
    # Letters in another order are another query, and so are other signs where no letter is.
    assert len(hold_out(pairs_of((f"{i:03}", (f"p{i}",)) for i in range(500)))[1]) == 100
    assert len(hold_out(pairs_of(("?" * i, (f"p{i}",)) for i in range(1, 501)))[1]) == 100


def graded_table(pairs: Sequence[tuple[str, str, float]]) -> RecordTable:
    writer = RecordWriter()
    for line, (query, document, grade) in enumerate(pairs, start=1):
        fits, fits_not = ((document,), ()) if grade > 0 else ((), (document,))
        writer.add(query, positives=fits, negatives=fits_not, scores=(grade,), file="t.jsonl", line=line)
    return writer.finish()


def pair_texts(table: RecordTable, rows: Sequence[int]) -> set[str]:
    return {text for each in table.take(rows) for text in (each.query, *each.positives, *each.negatives)}


@pytest.mark.parametrize("low", [0.0, -2.0])
def test_no_document_of_a_graded_pair_is_on_both_sides(low: float) -> None:
    table = graded_table([(f"q{i}", f"d{i // 2 % 200}", 3.0 if i % 2 else low) for i in range(800)])
    train_rows, held_out_rows, notes = hold_out(table)
    assert len(held_out_rows) == 100
    assert not pair_texts(table, train_rows.tolist()) & pair_texts(table, held_out_rows.tolist())
    assert notes[0].endswith("; no text is on both sides.")


def test_low_grades_of_documents_that_hang_together_do_not_keep_rows_from_being_held_out() -> None:
    rng = random.Random(4)
    pairs = [(f"q{i}", f"p{i}", 1.0) for i in range(200)]
    pairs += [(f"q{i}", f"p{rng.randrange(200)}", 0.0) for i in range(200) for _ in range(4)]
    table = graded_table(pairs)
    train_rows, held_out_rows, notes = hold_out(table)
    assert len(held_out_rows) == 100
    assert not texts(table, train_rows.tolist()) & texts(table, held_out_rows.tolist())
    assert pair_texts(table, train_rows.tolist()) & pair_texts(table, held_out_rows.tolist())
    assert notes[0].endswith("; no query or positive is on both sides.")


def test_the_order_of_rows_does_not_matter() -> None:
    rows = tangled_rows()
    shuffled = random.Random(2).sample(rows, len(rows))
    assert shuffled != rows
    one, other = pairs_of(rows), pairs_of(shuffled)
    held = [sorted((r.query, r.positives) for r in t.take(hold_out(t)[1])) for t in (one, other)]
    assert held[0] == held[1]


def test_the_choice_depends_on_content() -> None:
    rows = [(f"q{i}", (f"p{i}",)) for i in range(200)]
    renamed = [(f"q{i}", (f"other {i}",)) for i in range(200)]
    assert hold_out(pairs_of(rows))[1].tolist() != hold_out(pairs_of(renamed))[1].tolist()


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (200, {"fraction": 0.05, "limit": 1000}, 10),
        (200, {"fraction": 0.05, "limit": 4}, 4),
        (100, {"fraction": 0.29, "limit": 50}, 29),
        *[
            (5, {}, 1),
            (60, {}, 12),
            (300, {}, 60),
            (500, {}, 100),
            (1999, {}, 100),
            (2100, {}, 105),
            (30_000, {}, 1000),
        ],
    ],
)
def test_the_size_is_the_smaller_of_limit_and_fraction_and_more_of_a_small_set(
    count: int, options: dict[str, Any], expected: int
) -> None:
    _, held_out_rows, notes = hold_out(plain_pairs(count), **options)
    assert len(held_out_rows) == expected
    assert f"{expected} of {count} rows held out" in notes[0].replace(",", "")


def test_a_component_that_is_too_large_is_passed_over() -> None:
    rows = [(f"q{i}", ("the same answer",)) for i in range(50)] + [(f"r{i}", (f"p{i}",)) for i in range(50)]
    table = pairs_of(rows)
    held = table.take(hold_out(table, fraction=0.05)[1])
    assert len(held) == 5
    assert all(record.query.startswith("r") for record in held)


def test_too_little_data_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"too few rows .*4 records.*val_data_path.*eval_strategy: no"):
        hold_out(plain_pairs(4))
    assert len(hold_out(plain_pairs(5))[1]) == 1


def test_data_that_hangs_together_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"share a query or a positive.*val_data_path"):
        hold_out(pairs_of([(f"q{i}", ("one answer",)) for i in range(100)]))


def test_fewer_rows_than_asked_for_are_noted() -> None:
    table = pairs_of([(f"q{i // 3}", (f"p{i}",)) for i in range(99)])
    _, held_out_rows, notes = hold_out(table, fraction=0.05)  # 4 rows: one group of 3, and no group of 1
    assert len(held_out_rows) == 3
    assert "1 fewer than asked for" in notes[1]


def test_training_documents_are_distractors_and_nothing_else_of_training_is() -> None:
    rows = [(f"q{i}", (f"p{i}",)) for i in range(300)]
    table = pairs_of(rows)
    train_rows, held_out_rows, _ = hold_out(table)
    task = held_out_task(table, train_rows, held_out_rows)
    train, held = (set(part.tolist()) for part in (train_rows, held_out_rows))
    assert set(task.queries.values()) == {f"q{i}" for i in held}
    assert set(task.documents.values()) == {f"p{i}" for i in range(300)} | {"shared negative"}
    judged = {task.documents[name] for grades in task.qrels.values() for name in grades}
    assert judged == {f"p{i}" for i in held}
    assert train
    assert "the held-out queries search their own 61 documents and 240 of training." in task.notes
    shuffled = pairs_of(random.Random(3).sample(rows, len(rows)))
    assert set(held_out_task(shuffled, *hold_out(shuffled)[:2]).documents) == set(task.documents)


def test_what_is_searched_is_filled_up_to_a_thousand_documents() -> None:
    table = pairs_of([(f"q{i}", (f"p{i}", f"r{i}")) for i in range(900)])
    train_rows, held_out_rows, _ = hold_out(table)
    task = held_out_task(table, train_rows, held_out_rows)
    assert len(task.documents) == 1000
    own = {text for row in held_out_rows.tolist() for text in (f"p{row}", f"r{row}")}
    assert own < set(task.documents.values())
    others = {text for record in table for text in (*record.positives, *record.negatives)} - own
    added = sorted(others - {"shared negative"}, key=lambda text: content_id(text) % 2**64)[: 1000 - len(own) - 1]
    assert {*task.documents.values()} == own | {"shared negative", *added}, "the first by content hash"
    many = pairs_of([(f"q{i}", (f"p{i}", f"r{i}")) for i in range(15_000)])
    assert len(held_out_task(many, *hold_out(many)[:2]).documents) == 1501, "750 rows of two, and the negative"


def test_a_training_document_of_a_held_out_class_is_no_distractor() -> None:
    table = table_of((f"q{i}", (f"p{i}",), (), i // 4) for i in range(100))
    train_rows, held_out_rows, _ = hold_out(table)
    held = {row // 4 for row in held_out_rows.tolist()}
    assert any(row // 4 in held for row in train_rows.tolist()), "a class must be on both sides"
    own = {f"p{row}" for row in held_out_rows.tolist()}
    added = set(held_out_task(table, train_rows, held_out_rows).documents.values()) - own
    assert added == {f"p{row}" for row in train_rows.tolist() if row // 4 not in held}
    assert added


def test_a_held_out_query_is_no_document_of_its_own_set() -> None:
    table = table_of((f"t{i}", (f"p{i}",), (f"t{(i + 1) % 60}",)) for i in range(60))
    train_rows, held_out_rows, _ = hold_out(table)
    task = held_out_task(table, train_rows, held_out_rows)
    given = {f"t{(row + 1) % 60}" for row in held_out_rows.tolist()}
    assert {text for text in task.queries.values() if text in set(task.documents.values())} <= given


def test_what_a_small_dev_set_cant_resolve_is_said() -> None:
    (note,) = resolution_notes(15)
    assert "15 queries: differences under about 0.12 nDCG@10 can't be told from chance" in note
    assert "0.05" in resolution_notes(100)[0]
    assert resolution_notes(1000) == ()
