"""Tiny models and a corpus that the tests of this folder share."""

import json
from pathlib import Path

import pytest
import torch

from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder

DOCUMENTS = {
    "d1": "red apples grow on trees",
    "d2": "the train leaves at noon",
    "d3": "a recipe for apple pie",
    "d4": "how to sort a list in place",
}


@pytest.fixture(scope="session")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained transformer in a sentence-transformers folder that has prompts."""
    folder: Path = tmp_path_factory.mktemp("models") / "transformer"
    torch.manual_seed(0)
    load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), DOCUMENTS.values()).save(folder)
    path = folder / "config_sentence_transformers.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"prompts": {"query": "ask: ", "document": "doc: "}}))
    return folder


@pytest.fixture(scope="session")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BEIR folder of four documents and two judged queries."""
    folder: Path = tmp_path_factory.mktemp("data") / "fruit"
    (folder / "qrels").mkdir(parents=True)
    rows = [json.dumps({"_id": name, "title": "", "text": text}) for name, text in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    queries = {"q1": "apple pie recipe", "q2": "when does the train leave"}
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": q, "text": t}) for q, t in queries.items()))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td3\t2\nq1\td1\t1\nq2\td2\t1\n")
    return folder
