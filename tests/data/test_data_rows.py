"""Each rule that a row must keep, with a valid neighbour for each refusal; columns by name, by habit and by mapping."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kit.rows import Jsonl, Paint, load, only, refusal

from vembed.data.describe import describe_source, example
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.data.table import LoadedRecords, Record
from vembed.errors import ConfigError, DataError

GOOD = {"query": "a query", "positive": "an answer"}


def aliased(path: Path, mapping: Mapping[str, str | None]) -> Record:
    """Read a row as Python callers may, who also name aliases, which a configuration doesn't take."""
    (record,) = DataSource(str(path), "train", DataKeys.model_construct(column_mapping=mapping)).records().table
    return record


def load_mapped(path: Path, /, **mapping: Any) -> LoadedRecords:
    return load(path, column_mapping=mapping)


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
        *[({"query": "q"}, "positive", "missing"), ({"positive": "p"}, "query", "missing")],
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
        *[("{'query': 'q'}", None, "bad JSON"), ('{"query": "q", "positive": "p"', None, "bad JSON")],
        ('{"query": "q", "query": "r", "positive": "p"}', None, "the key 'query' is given twice"),
        *[("[" * 100_000, None, "bad JSON"), ('["q", "p"]', None, "expected a JSON object, got list")],
        ("null", None, "expected a JSON object"),
    ],
)
def test_a_broken_row_is_refused_with_line_column_and_reason(
    jsonl: Jsonl, row: Any, column: str | None, reason: str
) -> None:
    path = jsonl([GOOD, row, GOOD])
    message = refusal(path)
    assert f"1 invalid row in {path}" in message
    assert f"  train.jsonl:2: {column + ': ' if column else ''}" in message
    assert reason in message
    assert "skip_invalid_records: true" in message
    assert len(load(jsonl([GOOD, GOOD])).table) == 2


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
    jsonl: Jsonl, row: Any, positives: tuple[str, ...], negatives: tuple[str, ...], label: Any
) -> None:
    record = only(jsonl([row]), label_kind="class")
    assert (record.query, record.positives, record.negatives, record.label) == ("a query", positives, negatives, label)
    assert type(record.label) is type(label)
    assert record.location == "train.jsonl:1"


@pytest.mark.parametrize("query", ["query", "anchor", "caption", "sentence1", "question"])
@pytest.mark.parametrize(
    "positive", ["positive", "pos", "text", "passage", "document", "sentence2", "answer", "positive_passages"]
)
def test_names_of_query_and_positive(jsonl: Jsonl, query: str, positive: str) -> None:
    record = only(jsonl([{query: "q", positive: "p"}]))
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
def test_names_of_negatives(jsonl: Jsonl, columns: dict[str, Any]) -> None:
    assert only(jsonl([{**GOOD, **columns}])).negatives == ("a", "b")


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
def test_an_alias_beside_its_key_names_both(jsonl: Jsonl, extra: dict[str, Any], names: list[str]) -> None:
    path = jsonl([GOOD, {**GOOD, **extra}])
    with pytest.raises(DataError, match=r"train\.jsonl:2: columns") as caught:
        load(path)
    assert all(name in str(caught.value) for name in names)
    # The fix that the message gives, on rows that all have the column.
    last = names[1].strip("'")
    assert aliased(jsonl([{**GOOD, **extra}]), {last: None}).query == "a query"


def test_column_mapping_renames_and_drops(jsonl: Jsonl) -> None:
    row = {"claim": "q", "evidence": "p", "bad": "n", "label": 0.5, "query": "not this"}
    mapping = {"claim": "query", "evidence": "passage", "bad": "negative_1", "label": None, "query": None}
    record = aliased(jsonl([row]), mapping)
    assert (record.query, record.positives, record.negatives, record.label) == ("q", ("p",), ("n",), None)


def test_a_mapped_name_beside_its_key_or_of_no_row_is_refused(jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"'query' and 'claim' \(mapped to 'query'\) both mean 'query'"):
        aliased(jsonl([{**GOOD, "claim": "q"}]), {"claim": "query"})
    path = jsonl([{"claim": "q", "positive": "p"}])
    with pytest.raises(DataError, match=r"'claims'.*did you mean 'claim'\?"):
        load_mapped(path, claims="query")
    assert load_mapped(path, claim="query").table[0].query == "q"
    assert len(load_mapped(jsonl([GOOD, {**GOOD, "image": "x.png"}]), image=None).table) == 2, "one row has it"


def test_a_mapping_is_not_blamed_where_no_row_can_be_read(jsonl: Jsonl) -> None:
    path, mapping = jsonl(["{", "{"]), {"claim": "query"}
    message = refusal(path, column_mapping=mapping)
    assert message.startswith("2 invalid rows")
    assert "bad JSON" in message
    assert "column_mapping" not in message
    DataSource(str(path), "train", DataKeys(column_mapping=mapping)).peek()


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"claim": "qury"}, "did you mean 'query'"),
        ({"a": "query", "b": "anchor"}, "both 'a' and 'b' to 'query'"),
        ({"a": "negative_1", "b": "negative_1"}, "both 'a' and 'b' to 'negative_1'"),
    ],
)
def test_a_mapping_that_cannot_be_is_a_config_error(jsonl: Jsonl, mapping: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        aliased(jsonl([GOOD]), mapping)


def test_a_column_that_no_row_has_is_said_once(jsonl: Jsonl) -> None:
    path = jsonl([{"qeury": "q", "positive": "p"}] * 50)
    with pytest.raises(
        DataError, match=r"no row of .* has a column 'query'.*column_mapping: \{qeury: query\}"
    ) as caught:
        load(path)
    assert str(caught.value).count("\n") == 0


def test_unknown_columns_are_ignored_and_named_once(jsonl: Jsonl) -> None:
    loaded = load(jsonl([{**GOOD, "id": 1}, {**GOOD, "id": 2, "source": "x"}]))
    assert loaded.notes == ("Ignored columns: id, source.",)
    assert load(jsonl([GOOD])).notes == ()


def test_rows_with_one_problem_are_one_line_also_where_they_differ_by_a_value(jsonl: Jsonl) -> None:
    bad = {"query": "", "positive": "p"}
    lines = refusal(jsonl([GOOD, *[bad] * 33, "{"])).splitlines()
    assert lines[0].startswith("34 invalid rows in ")
    assert lines[1] == "  train.jsonl:2, 3, 4 and 30 more rows: query: empty text"
    assert lines[2].startswith("  train.jsonl:35: bad JSON")
    assert "max_invalid_records: 34" in lines[3]
    assert "  all 33 rows, the first train.jsonl:1: query: empty text\n" in refusal(jsonl([bad] * 33))
    pictures: list[Any] = [{"caption": "c", "image": f"{number}.png"} for number in range(300)]
    lines = refusal(jsonl(pictures)).splitlines()
    assert lines[1].startswith("  all 300 rows, the first train.jsonl:1: image: '0.png': no such file in")
    assert len(lines) == 3
    kinds = [chr(ord("a") + number) for number in range(25)]
    lines = refusal(jsonl([{**GOOD, f"bad_{name}": ""} for name in kinds for _ in range(2)])).splitlines()
    assert lines[1:21] == [f"  train.jsonl:{2 * n + 1}, {2 * n + 2}: bad_{kinds[n]}: empty text" for n in range(20)]
    assert lines[21] == "  ... and 10 more rows"


def test_skip_drops_counts_and_names_up_to_the_budget(jsonl: Jsonl) -> None:
    path = jsonl([GOOD, "{", {**GOOD, "query": "second"}, {"query": "q"}, GOOD])
    loaded = load(path, skip_invalid_records=True, max_invalid_records=2)
    assert [record.location for record in loaded.table] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:5"]
    assert loaded.num_invalid == 2
    assert "2 invalid rows dropped: train.jsonl:2: bad JSON" in loaded.notes[0]
    assert "train.jsonl:4: positive: missing" in loaded.notes[0]
    with pytest.raises(DataError, match=r"2 invalid rows in (.|\n)*more than max_invalid_records: 1"):
        load(path, skip_invalid_records=True, max_invalid_records=1)
    with pytest.raises(DataError, match="2 invalid rows"):
        load(path, skip_invalid_records=False, max_invalid_records=2)


def test_skipping_every_row_is_an_error(jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"all 2 rows of .* are invalid"):
        load(jsonl(["{", "{"]), skip_invalid_records=True, max_invalid_records=5)


# What was read, and the lines that tell it


PETS = {"question": "what purrs", "answer": "a cat"}


@pytest.fixture
def dot(paint: Paint) -> Path:
    return paint("dot.png")


def test_the_lines_say_how_many_rows_which_columns_and_one_row(jsonl: Jsonl) -> None:
    rows = [{**PETS, "question": f"what purrs {number} " * 9, "x": 1, "y": 2} for number in range(300)]
    lines = describe_source("pets.jsonl", load_mapped(jsonl(rows)), parts={"dev": 15})
    assert lines["data"] == "300 rows of pets.jsonl: 285 train, 15 dev; 0 hard negatives"
    assert lines["columns"] == "question as query, answer as positive; ignored: x, y"
    shown = ("what purrs 0 " * 9)[:60]
    assert lines["example"] == f"query '{shown}...', positive 'a cat'"


def test_whole_numbers_are_shown_whole() -> None:
    record = Record("q", ("p",), (), None, "r:1", columns={"clicks": 12345678, "weight": 0.5})
    assert example(record) == "query 'q', positive 'p', clicks 12345678, weight 0.5"


def test_of_many_scores_the_rest_is_counted() -> None:
    scores = tuple(number / 2 for number in range(7))
    for count, shown in ((7, "0, 0.5, 1, 1.5, 2 and 2 more"), (5, "0, 0.5, 1, 1.5, 2")):
        assert example(Record("q", ("p",), (), None, "r:1", scores=scores[:count])).endswith(f", scores {shown}")


def test_what_steers_a_terminal_is_shown(jsonl: Jsonl) -> None:
    path = jsonl([{"query": "\x1b]0;owned\x07", "positive": "p", "\x1b[2J": 1}])
    assert "\x1b" not in "".join(describe_source("\x1b[2J", load_mapped(path)).values())


@pytest.mark.parametrize(
    "names",
    [
        *[("bad_answer_1", "bad_answer_2"), ("wrong_a", "wrong_b"), ("neg_1", "neg_2"), ("hard_negative_1", "neg_2")],
        *[("neg_2", "neg_10"), ("hard_negative", "neg_x"), ("negative_a", "negative_b"), ("hard_neg_1", "hard_neg_2")],
        *[("bad_answer", "wrong_answers_2"), ("neg_passages", "negative_text"), ("hard_negatives_1", "neg_doc_2")],
    ],
)
def test_negatives_are_recognised_by_their_names_and_told(jsonl: Jsonl, names: tuple[str, str]) -> None:
    read = load_mapped(jsonl([{**PETS, names[1]: "b", names[0]: "a"}]))
    assert read.table[0].negatives == ("a", "b")
    assert "as negatives (by their names)" in describe_source("p", read)["columns"]
    (note,) = read.notes
    assert note.startswith("Taken by their names: ")
    assert all(name in note for name in names)
    assert load_mapped(jsonl([{**PETS, names[0]: "a"}]), **{names[0]: None}).table[0].negatives == ()


@pytest.mark.parametrize(
    "row",
    [
        {"neg_score": 0.5, "neg_id": 7, "bad_image_1": "x.png", "wrong_label": 1},
        {"negatives": [], "bad_1": "x"},
        {"negative_images": [], "bad_1": "x"},
        {"badly": "x", "negation": "x", "wrong": "x"},
        {"neg_prob": 0.5, "negative_votes": "12", "neg_logit": "-3.2", "neg_category": "x", "negative_reason": "x"},
        {"wrong_words": "x", "negative_title": "x", "hard_negative_source": "x", "bad_": "x"},
    ],
)
def test_no_column_is_taken_for_negatives_beside_named_ones_or_without_text(jsonl: Jsonl, row: dict[str, Any]) -> None:
    read = load_mapped(jsonl([{**PETS, **row}]))
    assert read.table[0].negatives == ()
    assert {*read.columns.ignored} == {*row} - {"negatives", "negative_images"}


def test_rows_that_name_their_negatives_decide_for_those_below(jsonl: Jsonl) -> None:
    named, other = {**PETS, "negatives": ["a"]}, {**PETS, "bad_answer": "b"}
    read = load_mapped(jsonl([named, other, named]))
    assert [read.table[row].negatives for row in range(3)] == [("a",), (), ("a",)]
    assert read.columns.text.endswith("negatives; ignored: bad_answer")
    read = load_mapped(jsonl([other, named | other]))
    assert [read.table[row].negatives for row in range(2)] == [("b",), ("a",)]
    assert read.columns.text.endswith("bad_answer, negatives as negatives (bad_answer by its name)")


def test_several_columns_map_to_negatives_as_a_list_or_one_by_one(jsonl: Jsonl) -> None:
    path = jsonl([{**PETS, "a": "1", "b": "2", "c": None}])
    for mapping in ({"negatives": ["b", "a", "c"]}, {"b": "negatives", "a": "negatives", "c": "negatives"}):
        read = load_mapped(path, **mapping)
        assert read.table[0].negatives == ("2", "1")
        assert "b, a, c as negatives" in describe_source("p", read)["columns"]
    with pytest.raises(DataError, match=r"no row of .* has that column"):
        load_mapped(path, negatives=["a", "z"])


def test_a_list_of_columns_is_for_negatives_alone(jsonl: Jsonl) -> None:
    path = jsonl([{**PETS, "negative": "a", "neg": "b"}])
    with pytest.raises(DataError, match=r"or take both with column_mapping: \{negatives: \[negative, neg\]\}"):
        load_mapped(path)
    assert load_mapped(path, negatives=["negative", "neg"]).table[0].negatives == ("a", "b")
    with pytest.raises(ValueError, match="names neg twice"):
        load_mapped(path, negatives=["neg"], neg="query")


@pytest.mark.parametrize("name", ["file_name", "filename", "filepath", "path"])
@pytest.mark.parametrize("caption", ["text", "caption", "query", "title"])
def test_a_file_beside_a_caption_is_its_picture(jsonl: Jsonl, dot: Path, name: str, caption: str) -> None:
    read = load_mapped(jsonl([{name: dot.name, caption: "a dot"}]))
    assert (read.table[0].query, read.table[0].positives[0].path) == ("a dot", str(dot))  # type: ignore[union-attr]
    assert f"{name} as positive_image (by its name)" in describe_source("p", read)["columns"]


def test_a_file_beside_a_pair_of_texts_or_a_named_picture_is_ignored(jsonl: Jsonl, dot: Path) -> None:
    assert load_mapped(jsonl([{**PETS, "path": "src/a.py"}])).columns.ignored == ("path",)
    row = {"caption": "a dot", "image": dot.name, "file_name": "else.png"}
    assert load_mapped(jsonl([row])).columns.ignored == ("file_name",)


def test_two_files_are_not_chosen_from(jsonl: Jsonl, dot: Path) -> None:
    path = jsonl([{"caption": "a dot", "path": dot.name, "file_name": dot.name}])
    with pytest.raises(DataError, match=r"'path' and 'file_name' may both name the picture: say which with"):
        load_mapped(path)
    assert len(load_mapped(path, path="positive_image").table) == 1


@pytest.mark.parametrize(
    ("document", "text"), [("text", "T d"), ("passage", "T d"), ("document", "T d"), ("answer", "d")]
)
def test_a_title_goes_before_the_text_of_a_document(jsonl: Jsonl, document: str, text: str) -> None:
    read = load_mapped(jsonl([{"query": "q", document: "d", "title": "T"}]))
    assert read.table[0].positives == (text,)
    told = "title put before the positive (by its name)" if text == "T d" else "; ignored: title"
    assert told in describe_source("p", read)["columns"]
    assert load_mapped(jsonl([{"query": "q", document: "d", "title": "T"}]), title=None).table[0].positives == ("d",)


def test_a_mapped_title_is_joined_whatever_the_document_is_called(jsonl: Jsonl) -> None:
    path = jsonl([{**PETS, "headline": "T"}, {**PETS, "headline": None}])
    assert [record.positives for record in load_mapped(path, headline="title").table] == [("T a cat",), ("a cat",)]
    with pytest.raises(DataError, match="headline: expected text, got int"):
        load_mapped(jsonl([{**PETS, "headline": 3}]), headline="title")
