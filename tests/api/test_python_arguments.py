"""Python calls take rows in memory in every form, and their errors name what the caller wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

import vembed
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = ["the sea is blue", "grass is green", "snow is white"]
DOCUMENTS = [{"_id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]
PAIRS = [{"query": text.split()[-1], "positive": text} for text in TEXTS]
TABLES: dict[str, Callable[[list[dict[str, str]]], Any]] = {
    "list": list,
    "generator": lambda rows: (row for row in rows),
    "pandas": pd.DataFrame,
    "arrow": pa.Table.from_pylist,
    "datasets": Dataset.from_list,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> vembed.EmbeddingModel:
    folder = tmp_path_factory.mktemp("model") / "bag"
    load_encoder(ModelKeys(model_name="builtin:ngram-bag"), TEXTS).save(folder)
    return vembed.load(folder)


@pytest.mark.parametrize("form", TABLES)
def test_rows_in_memory_are_evaluated_and_indexed_as_a_file_of_them(
    form: str, model: vembed.EmbeddingModel, tmp_path: Path
) -> None:
    result = vembed.evaluate(model, TABLES[form](PAIRS))
    assert (result.task, result.metrics["ndcg@10"] > 0.5) == ("data", True)
    meta = vembed.build_index(model, TABLES[form](DOCUMENTS), tmp_path / "index")
    (hits,) = vembed.open_index(tmp_path / "index", model=model).search(["grass is green"], k=1)
    assert (meta.source, hits[0].id, hits[0].text) == ("rows in memory", "d1", "grass is green")


def test_texts_in_memory_are_indexed_under_their_numbers(model: vembed.EmbeddingModel, tmp_path: Path) -> None:
    vembed.build_index(model, pd.Series(TEXTS), tmp_path / "index")
    (hits,) = vembed.open_index(tmp_path / "index", model=model).search(["snow is white"], k=1)
    assert (hits[0].id, hits[0].text) == ("2", "snow is white")


@pytest.mark.parametrize("form", ["pandas", "arrow", "datasets"])
def test_a_table_of_one_column_is_encoded_and_of_several_refused(form: str, model: vembed.EmbeddingModel) -> None:
    expected = model.encode(TEXTS, "document")
    np.testing.assert_array_equal(model.encode(TABLES[form]([{"text": text} for text in TEXTS]), "document"), expected)
    with pytest.raises(TypeError, match=r"with the columns _id, text; give one of them, as in encode\(table\['text'\]"):
        model.encode(TABLES[form](DOCUMENTS), "document")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": PAIRS}, "model is missing: "),
        ({"model": "builtin:ngram-bag"}, 'data is missing: rows, a path, or a set that is built in, data="builtin:'),
        ({"model": "builtin:ngrambag", "data": PAIRS}, "argument model=builtin:ngrambag: no built-in model"),
        ({"model": "builtin:ngram-bag", "data": PAIRS, "epoch": 1}, "argument epoch=1: unknown key; did you mean epo"),
        ({"model": "builtin:ngram-bag", "data": PAIRS, "val_data": "no.jsonl"}, "val_data: no.jsonl doesn't exist"),
        (
            {"model": "builtin:ngram-bag", "data": [*PAIRS, {"query": "", "positive": "b"}]},
            "1 invalid row in data:\n  data, row 4: query: empty text",
        ),
        ({"model": "builtin:ngram-bag", "data": [{"q": "a", "positive": "b"}]}, "no row of data has a column 'query'"),
    ],
)
def test_errors_of_training_name_the_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(vembed.VembedError) as refused:
        vembed.train(**arguments, output_dir=str(tmp_path / "run"), quiet=True)
    assert str(refused.value).startswith(message)
    assert not [word for word in ("override", "--", ".jsonl:") if word in str(refused.value)]


def test_a_word_is_renamed_only_where_it_stands_alone_and_was_an_argument(tmp_path: Path) -> None:
    folder = tmp_path / "my_data_path"
    keys: dict[str, Any] = {"model": "builtin:ngram-bag", "output_dir": str(tmp_path / "run"), "quiet": True}
    with pytest.raises(vembed.VembedError) as refused:
        vembed.train(**keys, data=str(folder / "data_path-1.jsonl"), val_data_path="no.jsonl")
    assert str(refused.value).startswith(f"data: {folder / 'data_path-1.jsonl'} doesn't exist")
    with pytest.raises(vembed.VembedError, match=r"^val_data_path: no.jsonl doesn't exist"):
        vembed.train(**keys, data=PAIRS, val_data_path="no.jsonl")
    with pytest.raises(vembed.ConfigError, match=r"^val_data and val_data_path say the same thing; keep one of them$"):
        vembed.train(**keys, data=PAIRS, val_data=PAIRS, val_data_path="no.jsonl")


def test_errors_of_indexes_name_the_arguments(model: vembed.EmbeddingModel, tmp_path: Path) -> None:
    vembed.build_index(model, TEXTS, tmp_path / "index")
    with pytest.raises(vembed.ConfigError, match="holds an index; replace it with overwrite=True, or choose another"):
        vembed.build_index(model, TEXTS, tmp_path / "index")
    with pytest.raises(vembed.DataError, match=r"data, row 1: no column 'text' .* Name it with text_column$"):
        vembed.build_index(model, [{"_id": "1", "body": "a"}], tmp_path / "other")
    with pytest.raises(vembed.ConfigError, match=r"make one with vembed\.build_index"):
        vembed.open_index(tmp_path / "nothing")
    with pytest.raises(vembed.ConfigError, match=r"format parquet doesn't fit output .*index: a Parquet file's name"):
        vembed.build_index(model, TEXTS, tmp_path / "index", format="parquet")
    (tmp_path / "index" / "checksums.json").write_text("{")
    with pytest.raises(vembed.ConfigError, match=r"is broken.* encode the corpus again with overwrite=True"):
        vembed.open_index(tmp_path / "index")
    with pytest.raises(TypeError, match="data is of type int, which is not rows"):
        vembed.build_index(model, 3, tmp_path / "other")
