"""Rows that stand in no file of rows: sets of the hub, folders that `datasets` saved, lists of files, plugins' sets."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from kit.rows import Jsonl, load, png, queries, refusal

import vembed
from vembed.batch import Image
from vembed.config.load import load_config
from vembed.data.columns import ExtraColumn, LossNeeds
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys, Role
from vembed.data.read import DataSource
from vembed.data.run_data import load_run_data
from vembed.data.table import Record
from vembed.errors import ConfigError, DataError, MachineError
from vembed.registry import DATASETS

# The hub. There is no network in tests: the one call that needs it is replaced where a data set is to be found


HUB_ROWS = [{"anchor": f"q{i}", "positive": f"p{i}", "label": f"topic {i % 2}", "extra": i} for i in range(2500)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Serve a data set of real Arrow data under any hub id; return the calls."""
    calls: list[tuple[Any, ...]] = []
    found = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(HUB_ROWS), "validation": datasets.Dataset.from_list(HUB_ROWS[:3])}
    )

    def load_dataset(*args: Any, **options: Any) -> datasets.DatasetDict:
        calls.append((*args, options))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_hub_set_becomes_records(hub: list[tuple[Any, ...]]) -> None:
    loaded = load("owner/name:some-config", "train")
    assert len(loaded.table) == len(HUB_ROWS)
    assert loaded.table[2400].query == "q2400"
    assert loaded.table[1].label == "topic 1"
    assert loaded.table[1].location == "owner/name:some-config/train:2"
    assert loaded.notes == ("Read split 'train' of owner/name:some-config.", "Ignored columns: extra.")
    assert hub == [("owner/name", "some-config", {})], "no option that would run a data set's code"


def test_the_role_or_the_split_chooses(hub: list[tuple[Any, ...]]) -> None:
    assert len(load("owner/name", "validation").table) == 3
    assert len(load("owner/name", "test", "validation").table) == 3
    assert DataSource("owner/name", "validation").judged().name == "owner/name"
    with pytest.raises(
        DataError, match=r"no split 'test'; it has: train, validation\. Choose one with test_data_split"
    ):
        load("owner/name", "test")


def test_columns_of_a_hub_set_are_checked_like_any_other(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match=r"did you mean 'anchor'"):
        load("owner/name", column_mapping={"anchr": "query"})
    with pytest.raises(DataError, match="no row of owner/name has a column 'query'"):
        load("owner/name", column_mapping={"anchor": None})


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (datasets.exceptions.DatasetNotFoundError("not there"), DataError, "no data set 'owner/name'"),
        (ConnectionError("no route"), MachineError, "hub can't be reached: no route"),
        (ValueError("BuilderConfig 'x' not found"), DataError, "can't be read: BuilderConfig 'x' not found"),
        (RuntimeError("Dataset scripts are no longer supported"), DataError, "scripts are no longer supported"),
    ],
)
def test_each_failure_of_the_hub_has_its_error(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], words: str
) -> None:
    def load_dataset(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(expected, match=words):
        load("owner/name", "train")


@pytest.mark.slow
def test_offline_without_a_cached_copy_says_how_to_get_one(tmp_path: Path) -> None:
    code = (
        "from vembed.data.read import DataSource; from vembed.errors import MachineError\n"
        "try: DataSource('owner/no-such-set', 'train').records()\n"
        "except MachineError as error: print(int(error.exit_code), error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60).stdout
    assert out.startswith("5 the data set 'owner/no-such-set' is not in the local cache")
    assert "hf download owner/no-such-set --repo-type dataset" in out


@pytest.mark.parametrize(
    ("path", "reason"),
    [("builtin:toy", "no built-in data set 'toy'"), ("sop:/nosuch", "--data: sop:/nosuch: there is no folder /nosuch")],
)
def test_a_set_that_is_not_there_is_told_without_reading_and_by_the_option_that_named_it(
    path: str, reason: str
) -> None:
    source = DataSource(path, "test", user_names=("--data", "--split"))
    with pytest.raises(DataError, match=reason):
        source.refuse_missing()
    with pytest.raises(DataError, match=reason):
        list(source.documents())


def test_a_set_in_the_present_folder_has_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "colours", "ab")
    monkeypatch.chdir(tmp_path / "colours")
    assert DataSource(".", "test").judged().name == "colours"


def test_what_ends_the_reading_of_one_of_two_files_of_one_name_says_of_which(tmp_path: Path) -> None:
    for folder, text in (("a", "query,positive\nq,p\n"), ("b", "query,query,positive\nq,q,p\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.csv").write_text(text)
    with pytest.raises(DataError) as refused:
        DataSource(f"{tmp_path}/*/train.csv", "train").records()
    assert str(refused.value).startswith(f"{tmp_path}/b/train.csv:1: ")


def test_a_split_that_a_beir_folder_lacks_is_told_without_reading(beir_files: Path) -> None:
    assert "no split 'nope'" in missing(beir_files, "validation", "nope")
    with pytest.raises(DataError, match="no split 'nope'"):
        DataSource(str(beir_files), "validation", split="nope").refuse_missing()


# Folders that `datasets` saved, and lists of files that are one source


def saved(folder: Path, names: str, **more: list[object]) -> datasets.Dataset:
    rows = datasets.Dataset.from_dict({"query": [f"q {name}" for name in names], "answer": [*names], **more})
    rows.save_to_disk(str(folder))
    return rows


def there(path: Path | str, role: Role = "train", split: str | None = None) -> list[object]:
    DataSource(str(path), role, split=split).refuse_missing()
    return queries(path, role=role, split=split)


def missing(path: Path | str, role: Role = "train", split: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        there(path, role, split)
    return str(caught.value)


def test_a_saved_set_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "set", "abc", extra=[1, 2, 3])
    (tmp_path / "set" / "cache-0123.arrow").write_bytes(b"of another step of the user's code")
    loaded = load(tmp_path / "set")
    assert [record.query for record in loaded.table] == ["q a", "q b", "q c"]
    assert loaded.table[2].location == "data-00000-of-00001.arrow:3"
    assert loaded.columns.ignored == ("extra",)
    assert "has no splits" in missing(tmp_path / "set", "train", "train")


@pytest.mark.usefixtures("cache")
def test_a_saved_set_of_several_files_is_read_in_order_and_kept(tmp_path: Path) -> None:
    names = [chr(ord("a") + number) for number in range(20)]
    rows = datasets.Dataset.from_dict({"query": names, "positive": [name * 2 for name in names]})
    rows.save_to_disk(str(tmp_path / "set"), num_shards=3)
    for _ in range(2):
        assert there(tmp_path / "set") == names
    assert load(tmp_path / "set").table.folder is not None


@pytest.mark.parametrize(
    ("role", "split", "expected"), [("train", None, "q a"), ("validation", None, "q b"), ("train", "extra", "q c")]
)
def test_a_saved_set_with_splits_is_never_read_across_them(
    tmp_path: Path, role: Role, split: str | None, expected: str
) -> None:
    parts = {"train": "a", "validation": "b", "extra": "c"}
    sets = {name: datasets.Dataset.from_dict({"query": [f"q {row}"], "text": [row]}) for name, row in parts.items()}
    datasets.DatasetDict(sets).save_to_disk(str(tmp_path / "set"))
    assert there(tmp_path / "set", role, split) == [expected]
    assert "has no split 'test'; it has: train, validation, extra" in missing(tmp_path / "set", "test")


def test_pictures_of_a_saved_set_are_read(tmp_path: Path) -> None:
    pictures = [{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": None}]
    features = datasets.Features({"caption": datasets.Value("string"), "image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"caption": ["a", "b"], "image": pictures}, features=features)
    rows.save_to_disk(str(tmp_path / "set"))
    first, second = load(tmp_path / "set").table
    assert [bytes(each.positives[0].data) for each in (first, second)] == [png(), png("blue")]  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/x.arrow", "", 7])
def test_a_saved_set_leads_out_of_its_folder_by_no_name(tmp_path: Path, name: object) -> None:
    saved(tmp_path / "set", "a")
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "state.json: expected the names of files of Arrow" in missing(tmp_path / "set")


def test_offsets_that_lead_out_of_a_column_are_refused(tmp_path: Path) -> None:
    offsets, values = pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x00\4\0\0\0"), pa.py_buffer(b"text")
    cells = pa.Array.from_buffers(pa.string(), 2, [None, offsets, values])
    batch = pa.record_batch({"query": cells, "text": ["p", "r"]})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    assert "t.arrow:1: can't be read as Arrow" in missing(tmp_path / "t.arrow")


def test_a_list_of_files_is_one_source(jsonl: Jsonl, tmp_path: Path) -> None:
    paths = []
    for name in "cab":
        rows = [{"query": f"{name}{row}", "positive": f"p{name}{row}"} for row in range(10)]
        paths.append(str(jsonl(rows, f"{name}.jsonl")))
    (tmp_path / "d.csv").write_text("query,positive\nd0,pd0\n")
    keys = DataKeys.model_validate({"data_path": [*paths, str(tmp_path / "d.c*")]})
    data = load_run_data(keys, needs_dev=False)
    assert [record.query for record in data.records] == [f"{name}{row}" for name in "cab" for row in range(10)] + ["d0"]
    assert data.sources == (keys.data_path,)
    assert there("{" + ",".join(paths[:2]) + "}") == [f"{name}{row}" for name in "ca" for row in range(10)]
    assert DataKeys.model_validate({"data_path": paths[:1]}).data_path == paths[0]
    several = DataKeys.model_validate({"data": [{"path": paths[:2]}, {"path": paths[2]}]})
    assert np.bincount(load_run_data(several, needs_dev=False).records.sources).tolist() == [20, 10]


@pytest.mark.parametrize(
    ("name", "head", "good", "bad"),
    [
        ("train.jsonl", "", '{"query": "q", "positive": "p"}\n', '{"query": "", "positive": "p"}\n'),
        ("train.csv", "query,positive\n", "q,p\n", '"",p\n'),
    ],
)
def test_rows_of_files_of_one_name_are_told_apart_by_whole_paths(
    tmp_path: Path, name: str, head: str, good: str, bad: str
) -> None:
    files = [tmp_path / part for part in (f"en/{name}", f"de/{name}", f"fr/other-{name}")]
    for file in files:
        file.parent.mkdir()
        file.write_text(head + good)
    listed, line = "{" + ",".join(map(str, files)) + "}", 2 if head else 1
    shown = [str(files[0]), str(files[1]), files[2].name]
    assert [record.location for record in load(listed).table] == [f"{each}:{line}" for each in shown]
    for file in files:
        file.write_text(head + good + bad)
    message = refusal(listed)
    assert all(f" {each}:{line + 1}" in message for each in shown), message


def test_a_list_names_files_that_are_there_and_no_sets(jsonl: Jsonl, beir_files: Path) -> None:
    good = str(jsonl([{"query": "q", "positive": "p"}]))
    assert "did you mean 'train.jsonl'" in missing("{" + good + "," + good.replace("train", "trian") + "}")
    assert "takes files and folders of rows" in missing("{" + good + ",owner/name}")
    assert "takes files and folders of rows" in missing("{" + good + f",{beir_files}" + "}")


@pytest.mark.parametrize(
    ("given", "words"), [("[a,b,3]", "must be a text or null"), ("['a,b', c]", "can't hold a comma")]
)
def test_a_list_that_names_no_files_is_a_config_error(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["model_name=m", f"data_path={given}"])
    assert load_config(None, ["model_name=m", "data_path=[a, 'b{0..3}.tar']"]).config.data_path == "{a,b{0..3}.tar}"


# Sets of plugins: rows as dictionaries or records, their judgements, and wrong ones by number


ROWS = [{"anchor": f"q{n}", "positive": f"p{n}"} for n in range(3)]


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register a set called toy-set, for one test."""
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(DATASETS, table, dict(getattr(DATASETS, table)))

    def register(make: Callable[[str], Any], **options: Any) -> None:
        def toy_set(split: str) -> Any:
            return make(split)

        if options:
            vembed.register_dataset(**options)(toy_set)
        else:
            assert vembed.register_dataset(toy_set) is toy_set

    return register


def test_dictionaries_are_read_as_rows_of_a_file_are(add: Callable[..., None]) -> None:
    add(lambda split: ({**row, "query_id": 1} for row in ROWS) if split == "train" else ROWS[:1])
    loaded = load("builtin:toy-set")
    assert [(record.query, record.location) for record in loaded.table] == [
        (f"q{n}", f"toy-set/train:{n + 1}") for n in range(3)
    ]
    assert loaded.notes == ("Ignored columns: query_id.",)
    assert len(load("builtin:toy-set", split="dev").table) == 1
    mapping = {"anchor": "positive", "positive": "query"}
    assert load("builtin:toy-set", column_mapping=mapping).table[0].query == "p0"
    task = DataSource("builtin:toy-set", "test").judged()
    assert (task.name, list(task.documents.values())) == ("toy-set/test", ["p0"])
    assert [document.text for document in DataSource("builtin:toy-set", "test").documents()] == ["p0"]


def test_names_of_columns_may_be_texts_of_numpy(add: Callable[..., None]) -> None:
    add(lambda _: [dict(zip(np.array(["anchor", "positive"]), ("q", "p"), strict=True))])
    assert queries("builtin:toy-set") == ["q"]


def test_columns_of_training_rows_mean_nothing_to_a_corpus(add: Callable[..., None]) -> None:
    add(lambda split: ROWS)
    of_training = DataKeys(column_mapping={"anchor": "positive", "positive": "query", "mine": None}, label_kind="pair")
    documents = list(DataSource("builtin:toy-set", "train", of_training).documents())
    assert [document.text for document in documents] == ["p0", "p1", "p2"]


def test_pictures_come_as_bytes(add: Callable[..., None]) -> None:
    add(lambda _: [{"query": "red", "image": png("red")}])
    (record,) = load("builtin:toy-set").table
    assert record.positives == (Image("toy-set/train:1 image", png("red")),)


def test_records_are_kept_as_they_are(add: Callable[..., None]) -> None:
    records = [
        Record("q", ("p",), ("n",), 7, "where:5", scores=(1.0, 0.5), columns={"weight": 2.0, "other": 1}),
        Record("r", ("s",), (), None, "where:6"),
    ]
    add(lambda _: iter(records))
    assert [record.label for record in load("builtin:toy-set").table] == [7, None]
    (note,) = load("builtin:toy-set", column_mapping={"claim": "query"}).notes
    assert note.startswith("column_mapping has no effect on")
    optional = ExtraColumn("weight", "how much it counts", required=False)
    facts = LossNeeds("toy", (optional,))
    first, second = DataSource("builtin:toy-set", "train", loss=facts).records().table
    assert (first.scores, dict(first.columns), first.location) == ((1.0, 0.5), {"weight": 2.0}, "where:5")
    assert dict(second.columns) == {"weight": 0.0}
    needed = LossNeeds("toy", (ExtraColumn("weight", "how much it counts"),))
    with pytest.raises(DataError, match=r"^where:6: weight: missing; loss_type toy needs it: how much it counts$"):
        DataSource("builtin:toy-set", "train", loss=needed).records()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], {"query": "", "positive": "p"}], "toy-set/train:2: query: empty text"),
        ([ROWS[0], ["q", "p"]], "toy-set/train:2: expected a dictionary or a Record, got list"),
        ([ROWS[0], {0: "a"}], "toy-set/train:2: the name of a column is no text"),
        ([], "builtin:toy-set holds no rows"),
        ([{"query": "q", "image": "a.png"}], "no folder of its own; set image_root"),
        ([{"query": "q", "positive": "p", "label": 1}], "toy-set/train:1: label holds 1 beside two texts"),
    ],
)
def test_what_is_wrong_is_named_by_number(add: Callable[..., None], rows: list[Any], words: str) -> None:
    add(lambda _: rows)
    with pytest.raises(DataError, match=words):
        load("builtin:toy-set")


def test_judgements_of_its_own_are_taken(add: Callable[..., None]) -> None:
    def judged(split: str) -> RetrievalData:
        return RetrievalData(f"toy-set/{split}", {"1": "q"}, {"2": "p", "3": "also p"}, {"1": {"2": 1, "3": 1}})

    add(lambda _: ROWS, retrieval=judged)
    assert DataSource("builtin:toy-set", "validation").judged().name == "toy-set/validation"
    assert len(load("builtin:toy-set").table) == 3


def test_a_record_without_a_line_is_refused(add: Callable[..., None]) -> None:
    add(lambda _: [Record("q", ("p",), (), None, "nowhere")])
    with pytest.raises(DataError, match=r"has the location 'nowhere'; write it as file:line"):
        load("builtin:toy-set")


def test_a_taken_name_is_refused() -> None:
    def shapes(split: str) -> list[Any]:
        return []

    with pytest.raises(ConfigError, match=r"data set 'shapes' of .* is already that of vembed"):
        vembed.register_dataset(shapes)
