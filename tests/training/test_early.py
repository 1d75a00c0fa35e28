"""What is told of a run before torch is imported: by `--validate`, and before any run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.rows import png
from kit.runs import write_rows

from vembed.checkpoint.format import FileEntry, Manifest, write_manifest
from vembed.config.load import load_values
from vembed.config.record import plain_values
from vembed.entrypoints import train
from vembed.errors import ConfigError, DataError, MachineError
from vembed.training.data import load_data
from vembed.training.early import paths_read, refuse_other_place, refuse_wrong_inputs, refuse_wrong_output
from vembed.training.output import OutputFolder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.config.schema import Config


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [{"query": f"q{n}", "positive": f"p{n}"} for n in range(3)])


def configured(path: Path, **values: object) -> Config:
    given = {"model_name": "builtin:ngram-bag", "data_path": str(path), "output_dir": str(path.parent / "out")}
    return load_values(given | values, {}).config


def test_a_valid_run_is_let_through_and_nothing_is_written(data: Path) -> None:
    refuse_wrong_inputs(configured(data))
    refuse_wrong_output(configured(data))
    assert list(data.parent.iterdir()) == [data]


def test_validate_tells_all_wrong_paths_at_once(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data.parent / "file").touch()
    words = {
        "model_name": "all-MiniLM-L6-v2",
        "val_data_path": data.parent / "row.jsonl",
        "test_data_path": data.parent / "zzz.jsonl",
        "data_path": data,
        "output_dir": data.parent / "file" / "out",
    }
    overrides = [f"{key}={value}" for key, value in words.items()]
    assert train.main(["--validate", "--config_override", *overrides]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "did you mean sentence-transformers/all-MiniLM-L6-v2?" in said[0]
    assert said[1].endswith("row.jsonl doesn't exist (did you mean 'rows.jsonl'?)")
    assert "zzz.jsonl doesn't exist" in said[2]
    assert said[3].endswith(f"out can't be written: {data.parent / 'file'} is a file. Choose another folder")
    assert len(said) == 4


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "q,positive\n1,2\n", "no row of {path} has a column 'query'"),
        ("a.tsv", "query\tp\n1\t2\n", "no row of {path} has a column 'positive'"),
        ("a.jsonl", '{"querry": "a", "positive": "b"}\n', "if 'querry' is meant: column_mapping: {querry: query}"),
        ("a.jsonl", '{"querry": "a", "positive": "b"}\n' * 200, "no row of the first 100 rows of {path} has a column"),
        ("a.csv", "query,anchor,positive\n1,2,3\n", "columns 'query' and 'anchor' both mean 'query'"),
    ],
)
def test_columns_that_lack_are_told_from_the_first_rows(data: Path, name: str, text: str, reason: str) -> None:
    path = data.with_name(name)
    path.write_text(text)
    for key in ("data_path", "val_data_path"):
        with pytest.raises(DataError) as refused:
            refuse_wrong_inputs(configured(data, **{key: str(path)}))
        assert reason.replace("{path}", str(path)) in str(refused.value)


def test_rows_that_may_be_dropped_and_columns_of_later_files_are_not_judged_early(data: Path) -> None:
    path = data.with_name("late.jsonl")
    path.write_text('{"zzz": 1}\n' * 100 + data.read_text())
    refuse_wrong_inputs(configured(path, skip_invalid_records=True))
    (data.parent / "parts").mkdir()
    (data.parent / "parts" / "0.csv").write_text("query,positive\na,b\n")
    (data.parent / "parts" / "1.csv").write_text("query,positive,extra\na,b,c\n")
    refuse_wrong_inputs(configured(data.parent / "parts", column_mapping={"extra": None}))
    (data.parent / "parts" / "0.csv").write_text("foo,bar\na,b\n")
    dropping = {"skip_invalid_records": True, "column_mapping": {"extra": None}}
    refuse_wrong_inputs(configured(data.parent / "parts", **dropping))


def test_the_schema_of_a_columnar_file_is_judged_as_a_header_is(data: Path) -> None:
    path = data.with_name("rows.parquet")
    pq.write_table(pa.table({"query": [f"q{n}" for n in range(300)], "positive": ["p"] * 300}), path)
    with pytest.raises(DataError, match="column_mapping names 'hard_negs'"):
        refuse_wrong_inputs(configured(path, column_mapping={"hard_negs": "negatives"}))


def with_pictures(folder: Path, layout: str) -> Path:
    """Write ten captions and their pictures, as a JSONL file or as a BEIR folder."""
    for number in range(10):
        (folder / f"{number}.png").write_bytes(png(f"rgb({number},0,0)", (8, 8)))
    if layout == "jsonl":
        rows = [{"caption": f"red {number}", "image": f"{number}.png"} for number in range(10)]
        return write_rows(folder / "pairs.jsonl", rows)
    judgements = (f"q{number}\t{number}\t1" for number in range(10))
    write_rows(folder / "qrels" / "train.tsv", ["query-id\tcorpus-id\tscore", *judgements])
    write_rows(folder / "queries.jsonl", [{"_id": f"q{number}", "text": f"red {number}"} for number in range(10)])
    write_rows(folder / "corpus.jsonl", [{"_id": str(number), "image": f"{number}.png"} for number in range(10)])
    return folder


@pytest.mark.parametrize(
    ("layout", "option", "keys"),
    [("jsonl", "--validate", "seed=1"), ("builtin", "--validate", "seed=1"), ("beir", "--plan", "use_lora=true")],
)
def test_pictures_for_a_model_of_texts_are_refused_before_it_is_loaded(
    tmp_path: Path, layout: str, option: str, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "builtin:shapes" if layout == "builtin" else with_pictures(tmp_path, layout)
    words = [f"data_path={path}", f"output_dir={tmp_path / 'out'}", keys]
    assert train.main([option, "--config_override", "model_name=builtin:tiny-transformer", *words]) == 3
    captured = capsys.readouterr().err
    assert f"builtin:tiny-transformer reads texts, and {path} holds pictures: choose a model" in captured
    assert train.main(["--validate", "--config_override", "model_name=builtin:tiny-clip", *words]) == 0


def test_a_model_of_the_hub_is_known_by_the_files_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_pictures(tmp_path, "jsonl")
    cache = tmp_path / "cache"
    repository = cache / "models--someone--text-model"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    refuse_wrong_inputs(configured(path, model_name="someone/text-model"))  # nothing here: the hub isn't asked
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    (repository / "snapshots" / "c0ffee" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(DataError, match=r"someone/text-model reads texts, and .* holds pictures"):
        refuse_wrong_inputs(configured(path, model_name="someone/text-model"))


def test_an_output_folder_that_is_not_free_is_refused(data: Path) -> None:
    out = data.parent / "out"
    (out / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds model, which no run wrote"):
        refuse_wrong_output(configured(data))
    (out / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the model of a run, and no checkpoint to continue from\. Choose another"):
        refuse_wrong_output(configured(data))
    (out / "model").rmdir()
    refuse_wrong_output(configured(data))
    refuse_wrong_output(configured(data, data_path=None))  # what data there are is asked elsewhere
    with pytest.raises(MachineError, match=r"rows\.jsonl can.t be written: it is a file"):
        refuse_wrong_output(configured(data, output_dir=str(data)))
    (data.parent / "link").symlink_to(data.parent / "nowhere")
    with pytest.raises(MachineError, match="link is a link that leads nowhere"):
        refuse_wrong_output(configured(data, output_dir=str(data.parent / "link" / "out")))


@pytest.mark.parametrize("key", ["model_name", "teacher_model_name", "data_path"])
def test_what_a_run_reads_is_not_overwritten_by_it(data: Path, key: str) -> None:
    out = data.parent / "out"
    (out / "model").mkdir(parents=True)
    (out / "plan.json").write_text("{}")
    read = out / "model"
    if key == "data_path":
        read = out / "mining" / "rows.jsonl"
        read.parent.mkdir()
        data.rename(read)
    other = {"data_path": str(read), "resume": "never", "overwrite_output_dir": True, key: str(read)}
    teaches = {"loss_type": "distillation"} if key == "teacher_model_name" else {}
    config = configured(data, **other, **teaches)
    with pytest.raises(ConfigError, match=f"holds what the run reads.*would delete it: {read}; choose another"):
        refuse_wrong_output(config)
    with pytest.raises(ConfigError, match="choose another output_dir"):
        OutputFolder(out).start_fresh(overwrite=True, reads=paths_read(config))
    assert read.exists()


def test_a_checkpoint_of_another_configuration_is_refused_with_the_ways_on(data: Path) -> None:
    first = configured(data)
    checkpoint = data.parent / "out" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (data.parent / "out" / "plan.json").write_text("{}")
    stamp = {"config": plain_values(first), "config_hash": "", "strategy": "single", "world_size": 1}
    refuse_wrong_output(configured(data, learning_rate=1e-4))  # a broken one is for the run to judge
    (checkpoint / "state.json").touch()
    write_manifest(checkpoint, Manifest(4, False, stamp, {}, {"state.json": FileEntry(0, "")}))
    refuse_wrong_output(first)
    refuse_wrong_output(configured(data, logging_steps=3))
    with pytest.raises(ConfigError) as refused:
        refuse_wrong_output(configured(data, learning_rate=1e-4))
    said = str(refused.value)
    assert "learning_rate: 2e-05 in the checkpoint, 0.0001 now" in said
    assert f"set model_name={data.parent / 'out' / 'model'} and another output_dir" in said
    with pytest.raises(ConfigError, match="holds another run"):
        refuse_wrong_output(configured(data, resume="never"))
    refuse_wrong_output(configured(data, resume="never", overwrite_output_dir=True, learning_rate=1e-4))
    with pytest.raises(ConfigError, match="is not a checkpoint; the newest one nearby is"):
        refuse_wrong_output(configured(data, resume=str(checkpoint.parent)))


def test_a_checkpoint_that_is_linked_from_another_disk_is_one_of_its_folder(data: Path) -> None:
    output, elsewhere = OutputFolder(data.parent / "out"), data.parent / "disk" / "step-00000004"
    inside, linked = output.checkpoints / "step-00000008", output.checkpoints / elsewhere.name
    for folder in (inside, elsewhere):
        folder.mkdir(parents=True)
    linked.symlink_to(elsewhere)
    (data.parent / "link").symlink_to(inside)
    for checkpoint in (inside, linked, data.parent / "link"):
        refuse_other_place(checkpoint, output)
    with pytest.raises(ConfigError, match="set output_dir to the folder of the run"):
        refuse_other_place(elsewhere, output)


def test_a_checkpoint_is_named_from_the_users_home(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(data.parent))
    checkpoint = data.parent / "out" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    stamp = {"config": plain_values(configured(data)), "config_hash": "", "strategy": "single", "world_size": 1}
    write_manifest(checkpoint, Manifest(4, False, stamp, {}, {"state.json": FileEntry(0, "")}))
    refuse_wrong_output(configured(data, resume="~/out/checkpoints/step-00000004"))
    with pytest.raises(ConfigError, match=f"the newest one nearby is {checkpoint}"):
        refuse_wrong_output(configured(data, resume="~/out/checkpoints/step-00000005"))


LISTED = [
    {"loss_type": "triplet", "triplet_negatives": "listed"},
    {"hardness_mode": "hard_negatives"},
    {"loss_type": "cosent", "added_losses": {"triplet": 0.5}, "triplet_negatives": "listed", "label_kind": "grade"},
]


@pytest.mark.parametrize("keys", LISTED)
def test_a_loss_of_hard_negatives_alone_is_refused_where_no_row_has_any(data: Path, keys: dict[str, object]) -> None:
    graded = "label_kind" in keys
    rows = [{"query": f"q{n}", "positive": f"p{n}"} | ({"label": n + 1} if graded else {}) for n in range(3)]
    write_rows(data, rows)
    mined = "" if graded else "let the run find some (mine=once), "
    name = "hardness_mode" if "hardness_mode" in keys else "triplet_negatives"
    with pytest.raises(DataError) as refused:
        load_data(configured(data, **keys, val_data_path=str(data)))
    assert str(refused.value) == (
        f"{data}: {name} {keys[name]} learns from the hard negatives of rows, and no row has any; add the column "
        f"negatives, {mined}or set {name} to another value"
    )
    if not graded:
        load_data(configured(data, **keys, val_data_path=str(data), mine="once"))
    rows[0] |= {"negatives": ["none of it"]} | ({"label": [1, 0]} if graded else {})
    write_rows(data, rows)
    load_data(configured(data, **keys, val_data_path=str(data)))


@pytest.mark.parametrize(
    ("loss", "keys", "more"),
    [
        ("triplet", {"triplet_negatives": "listed"}, {}),
        ("margin_mse", {"label_kind": "grade"}, {"positive": ["a", "b"], "label": [3, 1]}),
    ],
)
def test_a_source_without_what_its_own_loss_learns_from_is_refused(
    data: Path, loss: str, keys: dict[str, object], more: dict[str, Any]
) -> None:
    rows: list[Any] = [{"query": f"q{number}", "positive": f"p{number}"} | more for number in range(3)]
    others = [{"query": f"q{number}", "positive": f"p{number}", "negatives": ["n"]} for number in range(3)]
    other = write_rows(data.with_name("other.jsonl"), others)
    sources = [{"path": str(write_rows(data, rows)), "loss": loss}, {"path": str(other)}]
    config = configured(data, data_path=None, data=sources, source_batches="single", val_data_path=str(other), **keys)
    with pytest.raises(DataError, match="learns from the hard negatives of rows, and no row has any") as refused:
        load_data(config)
    assert str(refused.value).startswith(f"{data}: ")
    rows[0] |= {"negatives": ["none of it"]} | ({"label": [3, 1, 0]} if more else {})
    write_rows(data, rows)
    load_data(config)
