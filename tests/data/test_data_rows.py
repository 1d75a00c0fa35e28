"""Each rule that a row must keep, with a valid neighbour for each refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conftest import WriteJsonl

    from vembed.data.table import Record

TRAIN = {"role": "train"}
GOOD = {"query": "a query", "positive": "an answer"}


CLASSES = {"role": "train", "keys": DataKeys(label_kind="class")}


def mapped(mapping: Mapping[str, str | None]) -> dict[str, Any]:
    # Python callers may also name aliases, which a configuration doesn't take.
    return {"role": "train", "keys": DataKeys.model_construct(column_mapping=mapping)}


def only(write_jsonl: WriteJsonl, row: Any, options: dict[str, Any] = TRAIN) -> Record:
    (record,) = read(str(write_jsonl([row])), **options).records().table
    return record


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({"query": "", "positive": "p"}, "query", "empty text"),
        ({"query": " \t", "positive": "p"}, "query", "blank text"),
        ({"query": "\u3000", "positive": "p"}, "query", "blank text"),
        ({"query": "a\0b", "positive": "p"}, "query", "NUL byte"),
        ({"query": "é\0b", "positive": "p"}, "query", "NUL byte"),
        ({"query": None, "positive": "p"}, "query", "expected text, got null"),
        ({"query": 3, "positive": "p"}, "query", "expected text, got the number 3"),
        ({"query": True, "positive": "p"}, "query", "expected text, got true"),
        ({"query": ["q"], "positive": "p"}, "query", "expected text, got a list"),
        ('{"query": "half \\ud83d", "positive": "p"}', "query", "not valid UTF-8 text (character 6)"),
        ({"query": "q"}, "positive", "missing"),
        ({"positive": "p"}, "query", "missing"),
        ({"query": "q", "positive": None}, "positive", "no positives"),
        ({"query": "q", "positive": []}, "positive", "no positives"),
        ({"query": "q", "positive": ["p", ""]}, "positive", "empty text (item 2 of 2)"),
        ({"query": "q", "positive": ["p", 4]}, "positive", "expected text, got the number 4 (item 2 of 2)"),
        ({"query": "q", "positive": [["p"]]}, "positive", "expected text, got a list"),
        ({"query": "q", "positive": {"title": "t", "text": 5}}, "positive", "expected text in 'text'"),
        ({"query": "q", "positive": {"title": "", "text": " "}}, "positive", "empty text"),
        ({"query": "q", "positive": {"docid": "7"}}, "positive", "a passage needs 'text'"),
        ({"query": "q", "positive": "p", "negatives": ["n", " "]}, "negatives", "blank text (item 2 of 2)"),
        ({"query": "q", "positive": "p", "negatives": 0}, "negatives", "expected text, got the number 0"),
        ({"query": "q", "positive": "p", "negatives": ["n", " p\n"]}, "negatives", "the row's own positive: 'p'"),
        ({"query": "q", "positive": ["a", "p "], "negative_2": "p"}, "negative_2", "the row's own positive"),
        ({"query": "q", "positive": "p", "label": [1]}, "label", "not a list"),
        ({"query": "q", "positive": "p", "label": ""}, "label", "empty text; null means no label"),
        ("{'query': 'q'}", None, "bad JSON"),
        ('{"query": "q", "positive": "p"', None, "bad JSON"),
        ('{"query": "q", "query": "r", "positive": "p"}', None, "the key 'query' stands twice"),
        ("[" * 100_000, None, "bad JSON"),
        ('["q", "p"]', None, "expected a JSON object, got list"),
        ("null", None, "expected a JSON object"),
    ],
)
def test_a_broken_row_is_refused_with_line_column_and_reason(
    write_jsonl: WriteJsonl, row: Any, column: str | None, reason: str
) -> None:
    path = write_jsonl([GOOD, row, GOOD])
    with pytest.raises(DataError) as caught:
        read(str(path), **TRAIN).records()
    message = str(caught.value)
    assert f"1 invalid row in {path}" in message
    assert f"  train.jsonl:2: {column + ': ' if column else ''}" in message
    assert reason in message
    assert "skip_invalid_records: true" in message
    assert len(read(str(write_jsonl([GOOD, GOOD])), **TRAIN).records().table) == 2


@pytest.mark.parametrize(
    ("row", "positives", "negatives", "label"),
    [
        (GOOD, ("an answer",), (), None),
        ({**GOOD, "negatives": None, "label": None}, ("an answer",), (), None),
        ({**GOOD, "negatives": []}, ("an answer",), (), None),
        ({**GOOD, "negatives": "one"}, ("an answer",), ("one",), None),
        ({**GOOD, "negatives": ["one", "two"]}, ("an answer",), ("one", "two"), None),
        ({**GOOD, "positive": ["p1", "p2"]}, ("p1", "p2"), (), None),
        ({**GOOD, "positive": "a query"}, ("a query",), (), None),
        ({**GOOD, "negatives": "a query"}, ("an answer",), ("a query",), None),
        ({**GOOD, "negatives": "An answer"}, ("an answer",), ("An answer",), None),
        ({**GOOD, "positive": {"title": "T", "text": "x "}}, ("T x",), (), None),
        ({**GOOD, "positive": {"title": None, "text": "x"}}, ("x",), (), None),
        ({**GOOD, "positive": {"docid": "7", "text": "x"}}, ("x",), (), None),
        ({**GOOD, "negatives": [{"title": "T", "text": ""}, "n"]}, ("an answer",), ("T", "n"), None),
        ({**GOOD, "label": 3}, ("an answer",), (), 3),
        ({**GOOD, "label": 3.0}, ("an answer",), (), 3),
        ({**GOOD, "score": 3}, ("an answer",), (), 3),
        ({**GOOD, "label": -(2**63)}, ("an answer",), (), -(2**63)),
        ({**GOOD, "label": "0.5"}, ("an answer",), (), "0.5"),
        ({**GOOD, "positive": "  kept as it is\n"}, ("  kept as it is\n",), (), None),
        ({**GOOD, "positive": "naïve 🎉"}, ("naïve 🎉",), (), None),
    ],
)
def test_what_a_valid_row_becomes(
    write_jsonl: WriteJsonl, row: Any, positives: tuple[str, ...], negatives: tuple[str, ...], label: Any
) -> None:
    record = only(write_jsonl, row, CLASSES)
    assert (record.query, record.positives, record.negatives, record.label) == ("a query", positives, negatives, label)
    assert type(record.label) is type(label)
    assert record.location == "train.jsonl:1"


@pytest.mark.parametrize("query", ["query", "anchor", "caption", "sentence1", "question"])
@pytest.mark.parametrize(
    "positive", ["positive", "pos", "text", "passage", "document", "sentence2", "answer", "positive_passages"]
)
def test_names_of_query_and_positive(write_jsonl: WriteJsonl, query: str, positive: str) -> None:
    record = only(write_jsonl, {query: "q", positive: "p"})
    assert (record.query, record.positives) == ("q", ("p",))


@pytest.mark.parametrize(
    "columns",
    [
        {"negatives": ["a", "b"]},
        {"negative": ["a", "b"]},
        {"neg": ["a", "b"]},
        {"hard_negatives": ["a", "b"]},
        {"negative_passages": [{"text": "a"}, {"text": "b"}]},
        {"negative_1": "a", "negative_2": "b"},
        {"negative_10": "b", "negative_2": "a"},
        {"negative_1": ["a", "b"], "negative_3": None},
    ],
)
def test_names_of_negatives(write_jsonl: WriteJsonl, columns: dict[str, Any]) -> None:
    assert only(write_jsonl, {**GOOD, **columns}).negatives == ("a", "b")


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({"anchor": "x"}, ["'query'", "'anchor'"]),
        ({"anchor": None}, ["'query'", "'anchor'"]),
        ({"text": "x"}, ["'positive'", "'text'"]),
        ({"negatives": [], "neg": []}, ["'negatives'", "'neg'"]),
        ({"negatives": [], "negative_1": "x"}, ["'negatives'", "'negative_1'"]),
        ({"label": "x", "score": "x"}, ["'label'", "'score'"]),
    ],
)
def test_an_alias_beside_its_key_names_both(write_jsonl: WriteJsonl, extra: dict[str, Any], names: list[str]) -> None:
    path = write_jsonl([GOOD, {**GOOD, **extra}])
    with pytest.raises(DataError, match=r"train\.jsonl:2: columns") as caught:
        read(str(path), **TRAIN).records()
    assert all(name in str(caught.value) for name in names)
    # The fix that the message gives, on rows that all have the column.
    last = names[1].strip("'")
    assert only(write_jsonl, {**GOOD, **extra}, mapped({last: None})).query == "a query"


def test_rows_may_differ_in_their_names(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([GOOD, {"anchor": "q2", "text": "p2"}, {"negative_1": "n", **GOOD}])
    assert [record.query for record in read(str(path), **TRAIN).records().table] == ["a query", "q2", "a query"]


def test_column_mapping_renames_and_drops(write_jsonl: WriteJsonl) -> None:
    row = {"claim": "q", "evidence": "p", "bad": "n", "label": 0.5, "query": "not this"}
    mapping = {"claim": "query", "evidence": "passage", "bad": "negative_1", "label": None, "query": None}
    record = only(write_jsonl, row, mapped(mapping))
    assert (record.query, record.positives, record.negatives, record.label) == ("q", ("p",), ("n",), None)


def test_a_mapped_name_beside_its_key_names_both(write_jsonl: WriteJsonl) -> None:
    with pytest.raises(DataError, match=r"'query' and 'claim' \(mapped to 'query'\) both mean 'query'"):
        only(write_jsonl, {**GOOD, "claim": "q"}, mapped({"claim": "query"}))


def test_mapping_a_column_that_no_row_has_names_the_closest(write_jsonl: WriteJsonl) -> None:
    row = {"claim": "q", "positive": "p"}
    with pytest.raises(DataError, match=r"'claims'.*did you mean 'claim'\?"):
        only(write_jsonl, row, mapped({"claims": "query"}))
    assert only(write_jsonl, row, mapped({"claim": "query"})).query == "q"


def test_mapping_a_column_of_the_last_row_only_is_fine(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([GOOD, {**GOOD, "image": "x.png"}])
    assert len(read(str(path), **mapped({"image": None})).records().table) == 2


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"claim": "qury"}, "did you mean 'query'"),
        ({"a": "query", "b": "anchor"}, "both 'a' and 'b' to 'query'"),
        ({"a": "negative_1", "b": "negative_1"}, "both 'a' and 'b' to 'negative_1'"),
    ],
)
def test_a_mapping_that_cannot_be_is_a_config_error(
    write_jsonl: WriteJsonl, mapping: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        only(write_jsonl, GOOD, mapped(mapping))


def test_a_column_that_no_row_has_is_said_once(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{"qeury": "q", "positive": "p"}] * 50)
    with pytest.raises(
        DataError, match=r"no row of .* has a column 'query'.*column_mapping: \{qeury: query\}"
    ) as caught:
        read(str(path), **TRAIN).records()
    assert str(caught.value).count("\n") == 0


def test_unknown_columns_are_ignored_and_named_once(write_jsonl: WriteJsonl) -> None:
    loaded = read(str(write_jsonl([{**GOOD, "id": 1}, {**GOOD, "id": 2, "source": "x"}])), **TRAIN).records()
    assert loaded.notes == ("Ignored columns: id, source.",)
    assert read(str(write_jsonl([GOOD])), **TRAIN).records().notes == ()


def test_rows_with_one_problem_are_one_line(write_jsonl: WriteJsonl) -> None:
    bad = {"query": "", "positive": "p"}
    with pytest.raises(DataError) as caught:
        read(str(write_jsonl([GOOD, *[bad] * 33, "{"])), **TRAIN).records()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("34 invalid rows in ")
    assert lines[1] == "  train.jsonl:2, 3, 4 and 30 more rows: query: empty text"
    assert lines[2].startswith("  train.jsonl:35: bad JSON")
    assert "max_invalid_records: 34" in lines[3]
    with pytest.raises(DataError, match=r"  all 33 rows, the first train.jsonl:1: query: empty text\n"):
        read(str(write_jsonl([bad] * 33)), **TRAIN).records()
    with pytest.raises(DataError, match=r"  train.jsonl:1, 3: query: empty text\n"):
        read(str(write_jsonl([bad, GOOD, bad])), **TRAIN).records()


def test_problems_that_differ_by_a_value_are_one_line_with_the_first(write_jsonl: WriteJsonl) -> None:
    rows: list[Any] = [{"caption": "c", "image": f"{number}.png"} for number in range(300)]
    with pytest.raises(DataError) as caught:
        read(str(write_jsonl(rows)), **TRAIN).records()
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("  all 300 rows, the first train.jsonl:1: image: '0.png': no such file in")
    assert len(lines) == 3
    with pytest.raises(DataError, match=r"train.jsonl:2, 3, 4 and 297 more rows, the first: image: '0.png': no such"):
        read(str(write_jsonl([{"caption": "c", "image": "https://x"}, *rows])), **TRAIN).records()


def test_the_first_twenty_kinds_of_problems_and_the_count_are_listed(write_jsonl: WriteJsonl) -> None:
    names = [chr(ord("a") + number) for number in range(25)]
    rows: list[Any] = [{**GOOD, f"bad_{name}": ""} for name in names for _ in range(2)]
    with pytest.raises(DataError) as caught:
        read(str(write_jsonl(rows)), **TRAIN).records()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("50 invalid rows in ")
    assert lines[1:21] == [f"  train.jsonl:{2 * n + 1}, {2 * n + 2}: bad_{names[n]}: empty text" for n in range(20)]
    assert lines[21] == "  ... and 10 more rows"


def test_skip_drops_counts_and_names_up_to_the_budget(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([GOOD, "{", {**GOOD, "query": "second"}, {"query": "q"}, GOOD])
    loaded = read(str(path), "train", DataKeys(skip_invalid_records=True, max_invalid_records=2)).records()
    assert [record.location for record in loaded.table] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:5"]
    assert loaded.num_invalid == 2
    assert "2 invalid rows dropped: train.jsonl:2: bad JSON" in loaded.notes[0]
    assert "train.jsonl:4: positive: missing" in loaded.notes[0]
    with pytest.raises(DataError, match=r"2 invalid rows in (.|\n)*more than max_invalid_records: 1"):
        read(str(path), "train", DataKeys(skip_invalid_records=True, max_invalid_records=1)).records()
    with pytest.raises(DataError, match="2 invalid rows"):
        read(str(path), "train", DataKeys(skip_invalid_records=False, max_invalid_records=2)).records()


def test_skipping_every_row_is_an_error(write_jsonl: WriteJsonl) -> None:
    with pytest.raises(DataError, match=r"all 2 rows of .* are invalid"):
        read(
            str(write_jsonl(["{", "{"])), "train", DataKeys(skip_invalid_records=True, max_invalid_records=5)
        ).records()
