"""`vembed.train` as people call it: rows in memory in every form, typed keys, errors that name the arguments."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

import vembed
from vembed.api.keys import TrainKeys
from vembed.config.schema import key_names
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.training.output import OutputFolder

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).resolve().parents[2]

WORDS = ("red", "blue", "green", "white", "black", "fox", "tree", "car")

ROWS = [{"query": f"a {one} {two}", "positive": f"{one[::-1]} {two[::-1]}"} for one in WORDS for two in WORDS]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": "builtin:ngram-bag", "output_dir": tmp_path / "out", "batch_size": 16, "max_steps": 4,
        "learning_rate": 1e-2, "eval_strategy": "no", "bm25": False, "report_to": "none",
    }  # fmt: skip


@pytest.mark.slow
def test_rows_in_memory_train_and_resume_as_a_file_of_the_same_rows(keys: dict[str, Any], tmp_path: Path) -> None:
    weights = tmp_path / "out/model/model.safetensors"
    result = vembed.train(**keys, data=ROWS[:48], test_data=iter(ROWS[48:]))
    assert result.output == tmp_path / "out"
    (train,) = (tmp_path / "out/rows").glob("data-*.jsonl")
    (test,) = (tmp_path / "out/rows").glob("test_data-*.jsonl")
    first = weights.read_bytes()
    vembed.train(**keys | {"output_dir": tmp_path / "file"}, data=train, test_data=str(test))
    assert (tmp_path / "file/model/model.safetensors").read_bytes() == first
    weights.unlink()
    vembed.train(tmp_path / "out/config.yaml")  # the run is whole without the rows in memory
    assert weights.read_bytes() == first
    weights.unlink()
    vembed.train(**keys, data=(row for row in ROWS[:48]), test_data=ROWS[48:])
    assert weights.read_bytes() == first, "the same rows continue the same run"
    with pytest.raises(vembed.ConfigError, match=r"data: '.*/rows/data-\w{16}.jsonl' in the checkpoint"):
        vembed.train(**keys, data=ROWS[:40], test_data=ROWS[48:])
    again = keys | {"resume": "never", "overwrite_output_dir": True, "max_steps": 1}
    vembed.train(**again, data=ROWS[:40], test_data=ROWS[48:])
    assert not train.exists(), "the rows of the run that was deleted"
    assert test.exists()


def test_a_file_that_another_wrote_among_the_rows_survives_a_call_that_fails(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "out/rows"

    def run(*_: object, **__: object) -> None:
        (folder / "mine.jsonl").write_text("{}\n")
        raise vembed.MachineError("enough")

    monkeypatch.setattr("vembed.api.training.run_from_config", run)
    with pytest.raises(vembed.MachineError):
        vembed.train(**keys, data=ROWS[:48], quiet=True)
    assert [path.name for path in folder.iterdir()] == ["mine.jsonl"]


def test_the_lines_of_the_command_are_printed_unless_quiet_or_logged_elsewhere(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object, **__: object) -> None:
        logging.getLogger("vembed.training.loop").info("step 1/4")
        logging.getLogger("vembed.training.loop").warning("odd")
        raise vembed.MachineError("enough")

    monkeypatch.setattr("vembed.api.training.run_from_config", run)
    for quiet, handlers, printed in (
        (False, [], "step 1/4\nwarning: odd\n"),
        (True, [], ""),
        (False, [logging.NullHandler()], ""),
    ):
        monkeypatch.setattr(logging.getLogger(), "handlers", handlers)  # pytest has some
        with pytest.raises(vembed.MachineError, match="enough"):
            vembed.train(**keys, data_path="builtin:stdlib-code", quiet=quiet)
        assert capsys.readouterr().out == printed
    assert logging.getLogger("vembed").handlers == []


def test_what_is_said_twice_or_wrong_is_refused_before_anything_is_written(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(vembed.ConfigError, match="model and model_name say the same thing"):
        vembed.train(**keys, model_name="x", data=ROWS)
    with pytest.raises(vembed.ConfigError, match="data and data_path say the same thing"):
        vembed.train(**keys, data_path="x", data=ROWS)
    with pytest.raises(vembed.DataError, match="lies/nowhere"):
        vembed.train(**keys, data=[{"path": str(tmp_path / "lies/nowhere.jsonl"), "weight": 2.0}])
    with pytest.raises(vembed.DataError, match="lies/nowhere"):
        vembed.train(**keys, data="builtin:stdlib-code", test_data=[tmp_path / "lies/nowhere.jsonl"])
    assert not (tmp_path / "out").exists()


def test_a_refused_call_leaves_no_rows(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(vembed.DataError, match="val_data holds no rows"):
        vembed.train(**keys, data=ROWS, val_data=[])
    with pytest.raises(vembed.DataError, match="query: empty text"):
        vembed.train(**keys, data=[*ROWS, {"query": "", "positive": "p"}])
    assert not (tmp_path / "out/rows").exists()

    def interrupted(*_: object, **__: object) -> None:
        (path,) = (tmp_path / "out/rows").glob("data-*.jsonl")
        (tmp_path / "out/config.yaml").write_text(f"data_path: {path}")
        raise vembed.MachineError("enough")

    monkeypatch.setattr("vembed.api.training.run_from_config", interrupted)
    for rows in (ROWS, ROWS):
        with pytest.raises(vembed.MachineError, match="enough"):
            vembed.train(**keys, data=rows)
    assert len([*(tmp_path / "out/rows").iterdir()]) == 1, "the run that has begun goes on with them"


def test_a_folder_in_use_gets_no_rows(keys: dict[str, Any], tmp_path: Path) -> None:
    import threading

    from vembed.distributed.lock import hold_output

    refused: list[BaseException] = []

    def second() -> None:
        try:
            vembed.train(**keys, data=ROWS)
        except vembed.ConfigError as error:
            refused.append(error)

    with hold_output(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert not (tmp_path / "out/rows").exists()
    assert "is written by another thread" in str(refused[0])


def test_starting_afresh_deletes_rows_of_another_run_and_nothing_of_the_user(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    old, new = rows / f"data-{'0' * 16}.jsonl", rows / f"data-{'1' * 16}.jsonl"
    for path in (old, new, rows / "mine.jsonl"):
        path.write_text("")
    OutputFolder(tmp_path).start_fresh(overwrite=False, reads=[new])
    assert sorted(path.name for path in rows.iterdir()) == [new.name, "mine.jsonl"]


def test_the_typed_keys_are_those_of_the_schema() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vembed.config.reference", "keys"], capture_output=True, check=True, cwd=ROOT
    )
    assert (ROOT / "vembed/api/keys.py").read_text("utf-8") == done.stdout.decode(), "`make docs` writes it anew"
    assert {*key_names()} - {"data"} <= {*TrainKeys.__annotations__}


@pytest.mark.slow
def test_a_type_checker_knows_the_keys_and_what_functions_return(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import vembed\n"
        "vembed.train(model='m', data=[{'query': 'a', 'positive': 'b'}], learning_rate=1e-5, loss_type='mine')\n"
        "vembed.train(model='m', learning_rate='fast')\n"
        "vembed.train(model='m', learning_rat=1e-5)\n"
        "model = vembed.load('m', max_seq_length=8)\n"
        "reveal_type(model.encode(['a'], side='query'))\n"
        "vembed.load('m', max_length=8)\n"
    )
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install -e .[dev]")
    options = ["--cache-dir", str(tmp_path), "--ignore-missing-imports", "--follow-imports=silent"]
    out, _, _ = mypy.run([*options, str(program)])
    assert "program.py:2" not in out
    assert 'program.py:3: error: Argument "learning_rate"' in out
    assert 'program.py:4: error: Unexpected keyword argument "learning_rat"' in out
    assert "ndarray[" in out
    assert 'program.py:7: error: Unexpected keyword argument "max_length"' in out


# Rows in memory in every form, and errors that name what the caller wrote


TEXTS = ["the sea is blue", "grass is green", "snow is white"]

DOCUMENTS = [{"_id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]

PAIRS = [{"query": text.split()[-1], "positive": text} for text in TEXTS]

TABLES: dict[str, Callable[[list[dict[str, str]]], Any]] = {
    "list": list, "generator": lambda rows: (row for row in rows), "pandas": pd.DataFrame,
    "arrow": pa.Table.from_pylist, "datasets": Dataset.from_list,
}  # fmt: skip


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
        ({"model": "builtin:ngram-bag", "data": [*PAIRS, {"query": "", "positive": "b"}]}, "1 invalid row in"),
        ({"model": "builtin:ngram-bag", "data": [{"q": "a", "positive": "b"}]}, "no row of data has a column 'query'"),
    ],
)
def test_errors_of_training_name_the_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(vembed.VembedError) as refused:
        vembed.train(**arguments, output_dir=str(tmp_path / "run"), quiet=True)
    assert str(refused.value).startswith(message)
    assert not [word for word in ("override", "--", ".jsonl:") if word in str(refused.value)]


def test_a_word_is_renamed_only_where_it_stands_alone_and_was_an_argument(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "my_data_path"
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
    with pytest.raises(vembed.DataError, match=r"data, row 1: no column 'text', .* Name it with text_column$"):
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
