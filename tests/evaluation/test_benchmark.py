"""A benchmark keeps vectors and results: read exactly while they are true, made again when anything of them changes."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vembed.data.judged import RetrievalData
from vembed.errors import ConfigError, MachineError
from vembed.evaluation.benchmark.names import model_labels, set_labels, unique_folders
from vembed.evaluation.benchmark.run import BenchmarkOptions, Entry, run_benchmark
from vembed.evaluation.benchmark.stored import Cost, read_stored, task_key, write_stored
from vembed.evaluation.results import EvaluationResult
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.registry import METRICS, import_plugins
from vembed.vectors.provenance import changed_parts, item_id, items_digest, model_key, vectors_key

KEY = {"weights": "a", "texts": "b"}


RESULT = EvaluationResult(
    "task", "bag", {"ndcg@10": 0.5}, {"ndcg@10": {"q1": 0.5}}, {"q1": (("d1", 0.25),)}, 1, 2, ("a note.",), 0.5
)


COST = Cost(3, 12.0, milliseconds_per_query=0.1, milliseconds_p95=0.2, milliseconds_p99=0.3, num_timed=1)


def bag(**changes: int) -> NgramBag:
    torch.manual_seed(0)
    return NgramBag(NgramBagConfig(**({"dimension": 8, "buckets": 64} | changes)))


def test_a_models_key_is_its_weights_and_its_settings() -> None:
    assert model_key(bag()) == model_key(bag())
    other = bag()
    with torch.no_grad():
        other.weight.weight[3] += 1e-6
    assert changed_parts(model_key(bag()), model_key(other)) == ["weights"]
    assert changed_parts(model_key(bag()), model_key(bag(max_words=9))) == ["encoder"]


def test_the_key_of_vectors_sees_texts_their_borders_tokenizer_side_and_precision() -> None:
    encoder, key = bag(), model_key(bag())

    def of(encoder: NgramBag = encoder, side: str = "query", dtype: torch.dtype | None = None):
        return vectors_key(encoder, key, side, autocast_dtype=dtype)

    assert of() == of(bag())
    assert items_digest(["a", "b"]) != items_digest(["b", "a"])
    assert items_digest(["ab", "c"]) != items_digest(["a", "bc"])
    assert len({*map(item_id, ["a", " a", "b", "a\ud800"])}) == 4, "white space counts: it may make a token"
    assert changed_parts(of(), of(bag(longest=4))) == ["preprocessing"]
    assert changed_parts(of(), of(side="document")) == ["side"]
    assert changed_parts(of(), of(dtype=torch.bfloat16)) == ["precision"]
    assert items_digest(["a\ud800"]) != items_digest(["a"])


def test_a_prompt_changes_the_key_of_its_side_alone() -> None:
    plain = load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), ["some words"])
    prompted = plain.with_prompts({"document": "words "})
    model = model_key(plain)
    for side, changed in (("document", ["preprocessing"]), ("query", [])):
        keys = [vectors_key(encoder, model, side, autocast_dtype=None) for encoder in (plain, prompted)]
        assert changed_parts(*keys) == changed


def test_a_changed_query_is_the_only_one_that_is_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag().save(tmp_path / "bag")
    path, encoded, forward = tmp_path / "rows.jsonl", [], NgramBag.forward

    def counting(self: NgramBag, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        encoded.append(len(inputs["offsets"]))
        return forward(self, inputs)

    monkeypatch.setattr(NgramBag, "forward", counting)

    def run(queries: list[str]) -> Entry:
        encoded.clear()
        rows = [{"query": query, "positive": f"document {number}"} for number, query in enumerate(queries)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = BenchmarkOptions(torch.device("cpu"), 64, None, None, None, lambda: None)
        (entry,) = run_benchmark([ModelKeys(model_name=str(tmp_path / "bag"))], [str(path)], tmp_path / "out", options)
        return entry

    queries = [f"the query {number}" for number in range(20)]
    run(queries)
    assert sum(encoded) == 40
    entry = run([*queries[:7], "another query", *queries[8:]])
    assert (sum(encoded), entry.resumed) == (1, False)
    assert entry.result.num_queries == 20


def test_a_plugins_metric_that_is_new_or_was_edited_is_computed_on_kept_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries))
    monkeypatch.setattr(METRICS, "_plugins", dict(METRICS._plugins))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    bag().save(tmp_path / "bag")
    rows = [{"query": f"the query {number}", "positive": f"document {number}"} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = BenchmarkOptions(torch.device("cpu"), 64, None, None, "english", lambda: None)

    def run() -> list[tuple[bool, float | None]]:
        entries = run_benchmark([ModelKeys(model_name="bag")], ["rows.jsonl"], Path("out"), options)
        return [(entry.resumed, entry.result.metrics.get("constant@1")) for entry in entries]

    assert run() == [(False, None)] * 2
    for number in (1, 22):  # of other lengths: Python tells sources of one second apart by their size
        code = f"import vembed\n\n\n@vembed.register_metric\ndef constant(ranked, judged, k):\n    return {number}\n"
        (tmp_path / "constant_metric.py").write_text(code)
        sys.modules.pop("constant_metric", None)
        import_plugins(["constant_metric"])
        assert run() == [(False, number)] * 2
        assert run() == [(True, number)] * 2
    del sys.modules["constant_metric"]


def test_the_key_of_a_task_sees_ids_judgements_and_where_asked_texts() -> None:
    task = RetrievalData("t", {"q": "text"}, {"d": "other"}, {"q": {"d": 1}})
    same = RetrievalData("t", {"q": "text"}, {"d": "other"}, {"q": {"d": 1}})
    assert task_key(task, with_texts=True) == task_key(same, with_texts=True)
    graded = replace(task, qrels={"q": {"d": 2}})
    assert changed_parts(task_key(task, with_texts=True), task_key(graded, with_texts=True)) == ["judgements"]
    retold = replace(task, documents={"d": "changed"})
    assert changed_parts(task_key(task, with_texts=True), task_key(retold, with_texts=True)) == ["texts"]
    assert task_key(task, with_texts=False) == task_key(retold, with_texts=False)


def test_a_stored_result_comes_back_under_the_name_of_today_and_leaves_vectors_and_variants(tmp_path: Path) -> None:
    folder = tmp_path / "bag" / "set"
    vectors = folder / "vectors" / "documents" / "vectors.npy"
    vectors.parent.mkdir(parents=True)
    vectors.write_bytes(b"kept")
    write_stored(folder / "variants" / "int8", RESULT, COST, KEY)
    for _ in range(2):  # the second one replaces a folder
        write_stored(folder, RESULT, COST, KEY)
        assert read_stored(folder, KEY, system="./bag") == ((replace(RESULT, system="./bag"), COST), "")
        assert vectors.read_bytes() == b"kept"
        assert read_stored(folder / "variants" / "int8", KEY, system="bag")[0] is not None
    assert sorted(path.name for path in (tmp_path / "bag").iterdir()) == ["set"]
    assert read_stored(folder, KEY | {"weights": "z"}, system="bag") == (None, "changed: weights")


@pytest.mark.parametrize("operation", range(4))  # the old folder aside, the new one in its place, two entries back
@pytest.mark.parametrize("makes_vectors_anew", [False, True])
def test_a_kill_at_any_rename_loses_no_vectors_and_leaves_no_hidden_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: int, makes_vectors_anew: bool
) -> None:
    folder = tmp_path / "bag" / "set"
    vectors = folder / "vectors" / "documents" / "vectors.npy"
    vectors.parent.mkdir(parents=True)
    vectors.write_bytes(b"kept")
    write_stored(folder / "variants" / "int8", RESULT, COST, KEY)
    writer = os.fork()
    if writer == 0:
        renames, replace_path = itertools.count(), Path.replace
        try:
            monkeypatch.setattr(
                Path, "replace", lambda *paths: os._exit(9) if next(renames) == operation else replace_path(*paths)
            )
            write_stored(folder, RESULT, COST, KEY)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == 9
    if makes_vectors_anew:  # as a command does that hasn't looked for a result before
        vectors.parent.mkdir(parents=True, exist_ok=True)
        vectors.write_bytes(b"kept")
    read_stored(folder, KEY, system="bag")
    assert vectors.read_bytes() == b"kept"
    assert sorted(path.name for path in (tmp_path / "bag").iterdir()) == ["set"]
    write_stored(folder, RESULT, COST, KEY)
    assert read_stored(folder, KEY, system="bag")[0] == (RESULT, COST)
    assert vectors.read_bytes() == b"kept"


def test_a_broken_result_is_done_again_and_strangers_files_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_stored(folder, RESULT, None, KEY)
    assert read_stored(folder, KEY, system="bag")[0] == (RESULT, None)
    (folder / "run.trec").write_text("")
    found, reason = read_stored(folder, KEY, system="bag")
    assert found is None
    assert "can't be read" in reason
    record = json.loads((folder / "benchmark.json").read_text())
    (folder / "benchmark.json").write_text(json.dumps(record | {"cost": {"unknown": 1}}))
    assert read_stored(folder, KEY, system="bag")[0] is None
    stranger = tmp_path / "mine"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    with pytest.raises(MachineError, match="holds other files"):
        write_stored(stranger, RESULT, None, KEY)
    assert (stranger / "thesis.txt").read_text() == "years of work"


def test_names_are_short_tell_no_secret_and_no_two_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a/model", "runs/b/model", "bag", "secret=one", "secret=two"):
        (tmp_path / name).mkdir(parents=True)
    for names, labels in (
        (["runs/a/model", "bag", "owner/name"], ["a/model", "bag", "owner/name"]),
        (["runs/a/model", "runs/b/model"], ["a/model", "b/model"]),
        (["bag", "secret=one"], ["bag", "secret=***"]),
        (["secret=one", "secret=two"], ["secret=*** #1", "secret=*** #2"]),
    ):
        assert model_labels(names) == labels
    assert set_labels(["scifact/test", "tldr/test"], ["x/scifact", "x/tldr"]) == ["scifact/test", "tldr/test"]
    assert set_labels(["s/test", "s/test"], ["x/s", "y/s"]) == ["s/test (x/s)", "s/test (y/s)"]
    for label, twice in ((model_labels, (["bag", "./bag"],)), (set_labels, (["s", "s"], ["x/s", "x/s/"]))):
        with pytest.raises(ConfigError, match="named twice"):
            label(*twice)
    (tmp_path / "BM25").mkdir()
    assert model_labels(["./BM25"], taken=("BM25",)) == [f"{tmp_path.name}/BM25"]
    folders = unique_folders(["a b", "a/b", "c", "BM25"], taken=("BM25",))
    assert len({*folders, "BM25"}) == 5
    assert folders[2] == "c"
