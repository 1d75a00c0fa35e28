"""`vembed.train` as people call it: rows in memory, typed keys."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vembed
from vembed.api.keys import TrainKeys
from vembed.config.schema import key_names
from vembed.training.output import OutputFolder

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("red", "blue", "green", "white", "black", "fox", "tree", "car")
ROWS = [{"query": f"a {one} {two}", "positive": f"{one[::-1]} {two[::-1]}"} for one in WORDS for two in WORDS]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": "builtin:ngram-bag",
        "output_dir": tmp_path / "out",
        "batch_size": 16,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "eval_strategy": "no",
        "bm25": False,
        "report_to": "none",
    }


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
    with pytest.raises(vembed.ConfigError, match="did you mean batch_size"):
        vembed.train(**keys, batch_sise=3, data=ROWS)  # type: ignore[call-arg]
    with pytest.raises(vembed.DataError, match="lies/nowhere"):
        vembed.train(**keys, data=[{"path": str(tmp_path / "lies/nowhere.jsonl"), "weight": 2.0}])
    with pytest.raises(vembed.DataError, match="lies/nowhere"):
        vembed.train(**keys, data="builtin:stdlib-code", test_data=[tmp_path / "lies/nowhere.jsonl"])
    with pytest.raises(TypeError, match="data is of type int, which is not rows"):
        vembed.train(**keys, data=5)
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
def test_a_type_checker_knows_the_keys(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import vembed\n"
        "vembed.train(model='m', data=[{'query': 'a', 'positive': 'b'}], learning_rate=1e-5, loss_type='mine')\n"
        "vembed.train(model='m', learning_rate='fast')\n"
        "vembed.train(model='m', learning_rat=1e-5)\n"
    )
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install -e .[dev]")
    options = ["--cache-dir", str(tmp_path), "--ignore-missing-imports", "--follow-imports=silent"]
    out, _, _ = mypy.run([*options, str(program)])
    assert "program.py:2" not in out
    assert 'program.py:3: error: Argument "learning_rate"' in out
    assert 'program.py:4: error: Unexpected keyword argument "learning_rat"' in out
