"""docs/data.md is true: its rows load as it says, its configuration is valid, its names are those of the code."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from kit.rows import Paint

from vembed.batch import Composed, Image, modality_of
from vembed.config.schema import Config
from vembed.data.columns import COLUMNS
from vembed.data.keys import DataKeys, LabelKind
from vembed.data.presets import PRESETS
from vembed.data.read import DataSource
from vembed.errors import DataError
from vembed.registry import DATASETS

DOCUMENT = (Path(__file__).parents[2] / "docs/data.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+ ?\w*)\n(.*?)```", DOCUMENT, flags=re.DOTALL)
ROWS = [[json.loads(line) for line in text.splitlines()] for kind, text in BLOCKS if kind == "jsonl"]
DIRECTIONS = [("text", "text"), ("text", "image"), ("image", "image"), ("image+text", None), (None, "image")]


def write_pictures(rows: list[dict[str, Any]], paint: Paint) -> None:
    """Write a picture wherever the rows name one."""
    for number, name in enumerate(sorted(set(re.findall(r"[\w/]+\.jpg", json.dumps(rows))))):
        paint(name, f"#0000{10 + number}")


@pytest.mark.parametrize("place", range(len(DIRECTIONS)))
def test_the_rows_load_as_what_they_are_said_to_be(tmp_path: Path, paint: Paint, place: int) -> None:
    assert len(ROWS) == len(DIRECTIONS)
    rows, (query, document) = ROWS[place], DIRECTIONS[place]
    write_pictures(rows, paint)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loaded = DataSource(str(path), "train").records()
    assert len(loaded.table) == len(rows)
    assert loaded.notes == ()
    for record in loaded.table:
        assert query is None or modality_of(record.query) == query
        assert document is None or {modality_of(item) for item in record.positives} == {document}


def test_numbers_beside_two_texts_load_as_each_kind_says_and_are_never_guessed_at(tmp_path: Path) -> None:
    (text,) = (text for kind, text in BLOCKS if kind == "jsonl pairs")
    (tmp_path / "rows.jsonl").write_text(text)
    expected: dict[LabelKind, Any] = {"class": [(1, ()), (0, ())]}
    expected["pair"] = expected["grade"] = [(None, (1.0,)), (None, (0.0,))]
    for kind in get_args(LabelKind):
        assert f"\n| `{kind}` | " in DOCUMENT
        options = {"role": "train", "keys": DataKeys(label_kind=kind)}
        if kind in expected:
            table = DataSource(str(tmp_path / "rows.jsonl"), **options).records().table
            assert [(record.label, record.scores) for record in table] == expected[kind]
        else:
            with pytest.raises(DataError, match="label holds 0 and 1 beside two texts"):
                DataSource(str(tmp_path / "rows.jsonl"), **options).records()


def test_the_corpus_loads_as_what_it_is_said_to_be(tmp_path: Path, paint: Paint) -> None:
    (text,) = (text for kind, text in BLOCKS if kind == "jsonl corpus")
    write_pictures([json.loads(line) for line in text.splitlines()], paint)
    (tmp_path / "corpus.jsonl").write_text(text)
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "red"}\n')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("q\td2\t1\n")
    documents = DataSource(str(tmp_path), "test").judged().documents
    folder = tmp_path.resolve()
    assert documents == {
        "d1": Image(str(folder / "shirts/blue.jpg")),
        "d2": Composed((Image(str(folder / "shirts/red.jpg")),), "Shirt Red, of cotton"),
        "d3": "Shirts How to wash them",
    }


def test_the_configurations_are_valid() -> None:
    sets, sources, published = (
        Config.model_validate({"model_name": "m"} | yaml.safe_load(text)) for kind, text in BLOCKS if kind == "yaml"
    )
    assert published.retrieval_mode == "m2i"
    assert [each.source_batches for each in (sets, sources)] == ["mixed", "single"]
    assert [each.guard_data for each in (sets, sources)] == ["data/scifact", None]


def test_every_column_name_and_every_set_is_listed() -> None:
    table = DOCUMENT.partition("## Rows")[2].partition("```")[0]
    for column, aliases in COLUMNS.items():
        (line,) = (line for line in table.splitlines() if line.startswith(f"| `{column}` |"))
        named = line.split("|")[2].strip().partition(";")[0]
        assert (named.split(", ") if named else []) == list(aliases)
    for name in PRESETS.names():
        assert f"\n### {name}\n" in DOCUMENT
    assert all(f"`builtin:{name}`" in DOCUMENT for name in DATASETS.names())
