"""MTEB measures our models through its own library, and finds the numbers that we find on the same data."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vembed
from vembed.entrypoints.evaluate import main
from vembed.errors import ConfigError
from vembed.plugins.mteb.model import MtebModel, find_tasks

NEEDS_MTEB = "the extra mteb isn't installed: pip install 'vembed[mteb]'"
WORDS = ("apple", "train", "list", "river", "lamp", "noon", "pie", "green", "sort", "tree", "fox", "leaves")
DOCUMENTS = {f"d{n}": f"{one} {two}" for n, (one, two) in enumerate((a, b) for a in WORDS for b in WORDS if a != b)}
QUERIES = {f"q{n}": f"{one} and {WORDS[n - 1]}s" for n, one in enumerate(WORDS)}
QRELS = {
    query: {f"d{(7 * place + 3 * step) % len(DOCUMENTS)}": 1 + step % 2 for step in range(4)}
    | {next(name for name, words in DOCUMENTS.items() if words.startswith(text.split()[0])): 2}
    for place, (query, text) in enumerate(QUERIES.items())
}


@pytest.fixture
def fruit(tmp_path: Path) -> Path:
    """The data as a BEIR folder; titles stand before texts in both libraries."""
    folder = tmp_path / "fruit"
    (folder / "qrels").mkdir(parents=True)
    rows = [json.dumps({"_id": name, "title": "of", "text": text}) for name, text in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": q, "text": t}) for q, t in QUERIES.items()))
    lines = [f"{query}\t{document}\t{grade}" for query, row in QRELS.items() for document, grade in row.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same data as a task of MTEB, under a name that MTEB knows."""
    pytest.importorskip("mteb", reason=NEEDS_MTEB)
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.get_tasks import _TASKS_REGISTRY
    from mteb.mocks.mock_tasks.retrieval import general_args

    class FruitRetrieval(AbsTaskRetrieval):
        metadata = TaskMetadata(type="Retrieval", name="FruitRetrieval", main_score="ndcg_at_10", **general_args)  # type: ignore[arg-type]

        def load_data(self, *_: Any, **__: Any) -> None:
            corpus = [{"id": name, "title": "of", "text": text} for name, text in DOCUMENTS.items()]
            queries = [{"id": name, "text": text} for name, text in QUERIES.items()]
            parts = {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries)}
            self.dataset = {"default": {"test": {**parts, "relevant_docs": QRELS, "top_ranked": None}}}  # type: ignore[typeddict-item]
            self.data_loaded = True

    monkeypatch.setitem(_TASKS_REGISTRY, "FruitRetrieval", FruitRetrieval)
    return FruitRetrieval()


def evaluate(*words: object) -> int:
    return main([str(word) for word in words], program="vembed evaluate")


@pytest.mark.slow  # importing MTEB takes 10 s
def test_a_loaded_model_goes_into_mteb_and_scores_as_ours(transformer: Path, fruit: Path, task: Any) -> None:
    import mteb

    model = vembed.load(transformer)
    scores = mteb.evaluate(model, task, cache=None, co2_tracker=False).task_results[0].scores["test"][0]
    ours = vembed.evaluate(model, fruit).metrics
    assert 0.05 < ours["ndcg@10"] < 0.95
    for name in ("ndcg_at_10", "ndcg_at_100", "recall_at_10", "mrr_at_10"):  # MTEB rounds to five digits
        assert round(scores[name], 5) == round(ours[name.replace("_at_", "@")], 5), name
    meta = model.mteb_model_meta
    assert (meta.embed_dim, meta.similarity_fn_name.value, meta.use_instructions) == (model.dimension, "cosine", True)
    other = vembed.load(transformer, query_prompt="say: ")
    assert other.mteb_model_meta.revision != meta.revision == vembed.load(transformer).mteb_model_meta.revision


def test_the_revision_tells_models_apart_by_what_their_files_say(
    transformer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vembed.plugins.mteb.model.import_extra", lambda *words: SimpleNamespace(ModelMeta=SimpleNamespace)
    )
    shutil.copytree(transformer, tmp_path / "moved")
    shutil.copytree(transformer, tmp_path / "other")
    path = tmp_path / "other" / "1_Pooling" / "config.json"
    flags = json.loads(path.read_text()) | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    path.write_text(json.dumps(flags))
    shutil.copytree(transformer, tmp_path / "cased")
    path = tmp_path / "cased" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(
        json.dumps(tokenizer | {"normalizer": {"type": "Replace", "pattern": {"String": "e"}, "content": "a"}})
    )
    folders = (transformer, *(tmp_path / name for name in ("moved", "other", "cased")))
    own, moved, *others = [vembed.load(folder).mteb_model_meta.revision for folder in folders]
    assert own == moved
    assert len({own, *others}) == 3


@pytest.mark.slow
def test_other_kinds_of_tasks_and_pictures(bag: Path, clip: Path) -> None:
    mteb = pytest.importorskip("mteb", reason=NEEDS_MTEB)
    from mteb.mocks.mock_tasks.classification import MockClassificationTask
    from mteb.mocks.mock_tasks.retrieval import MockAny2AnyRetrievalT2ITask
    from mteb.mocks.mock_tasks.sts import MockSTSTask

    model = vembed.load(bag)
    for each in (MockSTSTask(), MockClassificationTask()):
        (result,) = mteb.evaluate(model, each, cache=None, co2_tracker=False).task_results
        assert -1 <= result.get_score() <= 1
    pictures = mteb.evaluate(vembed.load(clip), MockAny2AnyRetrievalT2ITask(), cache=None, co2_tracker=False)
    assert 0 <= pictures.task_results[0].get_score() <= 1


def test_pairs_are_compared_row_by_row(bag: Path) -> None:
    model = vembed.load(bag)
    queries, documents = model.encode(["apple", "noon"], "query"), model.encode(["a lamp", "noon"], "document")
    table = model.similarity(queries, documents)
    pairs = model.similarity_pairwise(queries, documents)
    np.testing.assert_allclose(pairs, [table[0, 0], table[1, 1]], rtol=1e-6)
    # A single vector is a row, as `similarity` takes it: its numbers are no pairs.
    np.testing.assert_allclose(model.similarity_pairwise(queries[1], documents[1]), [table[1, 1]], rtol=1e-6)


@pytest.mark.slow
def test_the_command_writes_mtebs_files_and_does_nothing_twice(
    bag: Path, transformer: Path, task: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    words = (bag, transformer, "--mteb", "FruitRetrieval", "--output", tmp_path / "out", "--batch-size", 8)
    assert evaluate(*words) == 0
    shown = capsys.readouterr().out
    files = sorted((tmp_path / "out" / "mteb" / "results").glob("*/*/FruitRetrieval.json"))
    values = [json.loads(file.read_text())["scores"]["test"][0]["ndcg_at_10"] for file in files]
    assert len(files) == 2
    assert all((file.parent / "model_meta.json").is_file() for file in files)
    table = next(line for line in shown.splitlines() if line.split()[:1] == ["FruitRetrieval"])
    assert sorted(table.split()[2:]) == sorted(f"{value:.3f}" for value in values)
    monkeypatch.setattr(type(task), "load_data", lambda *_, **__: pytest.fail("it is done"))
    assert evaluate(*words) == 0
    assert table in capsys.readouterr().out


@pytest.mark.slow
def test_without_network_and_with_a_wrong_name_the_error_is_plain(
    bag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mteb", reason=NEEDS_MTEB)
    assert evaluate(bag, "--mteb", "NanoBEIR", "--output", tmp_path / "out") == 5
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: NanoArguAnaRetrieval: its data set 'mteb/NanoArguAnaRetrieval' is not in the local")
    assert evaluate(bag, "--mteb", "nanobeir", "--output", tmp_path / "out") == 2
    assert "MTEB has no benchmark or task 'nanobeir'; did you mean 'NanoBEIR'?" in capsys.readouterr().err
    assert len(find_tasks(["NanoBEIR", "NanoArguAnaRetrieval"])) == 13


def test_a_missing_extra_and_options_without_effect_are_refused(
    bag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (bag, "--mteb", "NanoBEIR", "--output", tmp_path / "out")
    assert evaluate(*words, "--dims", "16", "--split", "dev") == 2
    assert "--mteb measures as MTEB does: leave out --dims and --split" in capsys.readouterr().err
    assert evaluate("bm25", *words[1:]) == 2
    assert "bm25 is no model of vectors" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(ConfigError, match=r'--mteb needs mteb, which is missing: pip install "vembed\[mteb\]"'):
        find_tasks(["NanoBEIR"])


def test_batches_of_mteb_are_encoded_as_rows_of_a_side(transformer: Path) -> None:
    model = vembed.load(transformer, query_prompt="say: ")
    batches = [{"text": ["apple", "noon"]}, {"text": ["a green lamp"]}]
    keywords = {"task_metadata": object(), "hf_split": "test", "hf_subset": "default", "batch_size": 2}
    for prompt_type, side in (("document", "document"), ("query", "query"), (None, "query")):
        expected = model.encode(["apple", "noon", "a green lamp"], side)
        for taken in (model, MtebModel(model)):
            vectors = taken.encode(iter(batches), prompt_type=prompt_type, **keywords)  # type: ignore[call-overload]
            np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert MtebModel(model).encode([], **keywords).shape == (0, model.dimension)
