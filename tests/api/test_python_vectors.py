"""The forms of vectors that callers ask for, what other libraries ask a model for, and the peer's names."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vembed
from vembed.api.model import Scoring, form_of

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "python.md"
TEXTS = ["apple pie", "a train at noon", "sort the list, please, and then sort it once more", "x"]


@pytest.fixture(scope="module")
def model(bag: Path) -> vembed.EmbeddingModel:
    return vembed.load(bag)


def test_fewer_numbers_have_unit_length_again(model: vembed.EmbeddingModel) -> None:
    whole, short = model.encode(TEXTS, "document"), model.encode(TEXTS, "document", dims=16)
    expected = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)
    for dims in (0, 65):
        with pytest.raises(ValueError, match=rf"dims is {dims}; .* 1 to 64 can be kept"):
            model.encode(TEXTS, "document", dims=dims)


def test_quantized_vectors_keep_the_cosines(model: vembed.EmbeddingModel) -> None:
    exact = model.similarity(model.encode(TEXTS, "query"), model.encode(TEXTS, "document"))
    codes = [model.encode(TEXTS, side, quantize="int8") for side in ("query", "document")]
    assert codes[0].dtype == np.int8
    assert np.abs(codes[0]).max(axis=1).tolist() == [127] * 4
    np.testing.assert_allclose(model.similarity(*codes), exact, atol=0.01)
    bits = [model.encode(TEXTS, side, quantize="binary") for side in ("query", "document")]
    assert (bits[0].dtype, bits[0].shape) == (np.uint8, (4, 8))
    hamming = np.unpackbits(bits[0][:, None] ^ bits[1][None], axis=2).sum(axis=2)
    np.testing.assert_allclose(model.similarity(*bits), (64 - 2.0 * hamming) / 64, atol=1e-6)
    with pytest.raises(ValueError, match="packs 8 numbers into a byte: 20 is no multiple of 8"):
        model.encode(TEXTS, "query", quantize="binary", dims=20)
    with pytest.raises(ValueError, match="quantize is 'int4'"):
        model.encode(TEXTS, "query", quantize="int4")  # type: ignore[call-overload]


def test_tensors_are_the_same_numbers(model: vembed.EmbeddingModel) -> None:
    tensor = model.encode(TEXTS, "query", as_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.numpy() == model.encode(TEXTS, "query")).all()
    assert model.encode(TEXTS, "query", quantize="int8", as_tensor=True).dtype == torch.int8
    assert model.similarity(tensor, tensor).shape == (4, 4)


def test_lengths_that_count_are_kept_or_refused() -> None:
    vectors = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    plain: dict[str, Any] = {"normalize": False, "dims": None, "quantize": None}
    assert (form_of(vectors, "dot", **plain) == vectors).all()
    assert form_of(vectors, "dot", **plain | {"normalize": True}).tolist() == [
        [np.float32(0.6), np.float32(0.8)],
        [0, 0],
    ]
    assert form_of(vectors, "dot", **plain | {"dims": 1}).tolist() == [[3], [0]]
    with pytest.raises(vembed.ConfigError, match="add normalize=True"):
        form_of(vectors, "dot", **plain | {"quantize": "int8"})
    assert form_of(vectors, "dot", **plain | {"quantize": "int8", "normalize": True}).tolist() == [[95, 127], [0, 0]]
    assert Scoring("dot")(vectors, vectors).tolist() == [[25, 0], [0, 0]]
    assert Scoring("cosine")(vectors, vectors).tolist() == [[1, 0], [0, 0]]
    lists, doubles = vectors.tolist(), vectors.astype(np.float64)
    assert Scoring("dot")(lists, doubles).tolist() == Scoring("dot")(vectors.astype(np.float16), vectors).tolist()
    assert Scoring("dot")(doubles, lists).tolist() == [[25, 0], [0, 0]]
    assert Scoring("cosine")(vectors[0], vectors).tolist() == [[1, 0]]
    assert Scoring("cosine") == "cosine"
    assert form_of(vectors[:0], "cosine", **plain | {"quantize": "int8"}).shape == (0, 2)


TEXTS_OF_FRUIT = ["red apples grow on trees", "the train leaves at noon", "a recipe for apple pie"]


@pytest.mark.slow  # the library's import takes seconds
def test_the_adapter_of_the_documentation_searches_in_langchain(model: vembed.EmbeddingModel) -> None:
    pytest.importorskip("langchain_core", reason="langchain-core isn't installed: pip install 'vembed[integrations]'")
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import InMemoryVectorStore

    adapter = _adapter("langchain_core", model)()
    assert isinstance(adapter, Embeddings)
    assert adapter.embed_documents(TEXTS) == model.encode(TEXTS, "document").tolist()
    assert all(type(number) is float for number in adapter.embed_query("x"))
    store = InMemoryVectorStore(adapter)
    store.add_texts(TEXTS_OF_FRUIT)
    found = [document.page_content for document in store.similarity_search("apple pie", k=3)]
    assert found == _ranked(model, "apple pie")


@pytest.mark.slow  # the library's import takes seconds
def test_the_adapter_of_the_documentation_searches_in_llama_index(model: vembed.EmbeddingModel) -> None:
    pytest.importorskip(
        "llama_index.core", reason="llama-index-core isn't installed: pip install 'vembed[integrations]'"
    )
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import TextNode

    adapter = _adapter("llama_index", model)()
    assert adapter.get_query_embedding("x") == model.embed_query("x")
    assert adapter.get_text_embedding("x") == model.embed_documents(["x"])[0]
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS_OF_FRUIT], embed_model=adapter)
    found = index.as_retriever(similarity_top_k=3).retrieve("apple pie")
    assert [each.node.get_content() for each in found] == _ranked(model, "apple pie")


def _ranked(model: vembed.EmbeddingModel, query: str) -> list[str]:
    """Return the texts, nearest first."""
    scores = model.encode([query], "query") @ model.encode(TEXTS_OF_FRUIT, "document").T
    return [TEXTS_OF_FRUIT[number] for number in (-scores[0]).argsort()]


def _adapter(library: str, model: vembed.EmbeddingModel) -> Any:
    """Run the adapter that docs/python.md shows for a library and return its class."""
    blocks = re.findall(r"```py\n(.*?)```", DOCUMENT.read_text("utf-8"), flags=re.DOTALL)
    (block,) = [each for each in blocks if library in each]
    names: dict[str, Any] = {"model": model}
    exec(compile(block, f"{DOCUMENT.name}, {library}", "exec"), names)
    return names["Embedder"]


def test_the_predictor_is_the_model_under_other_names(clip: Path, balls: Path) -> None:
    predictor, model = vembed.Predictor(clip), vembed.load(clip)
    assert (predictor.encode_text(["a red ball"]) == model.encode(["a red ball"], "query")).all()
    pictures = sorted(balls.glob("*.png"))
    expected = model.encode(pictures, "document", dims=8)
    assert (predictor.encode_image([str(path) for path in pictures], dims=8) == expected).all()


@pytest.mark.slow
def test_the_trainer_trains_with_a_loss_and_a_metric_of_this_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vembed.losses.base import BatchStructure, ContrastiveLoss
    from vembed.losses.registry import LossSection

    class SoftmaxKeys(LossSection):
        name = "session-softmax"

    class Softmax(ContrastiveLoss):
        """Cross entropy of each query's first positive."""

        keys = SoftmaxKeys

        def forward(self, q_QE: torch.Tensor, d_DE: torch.Tensor, structure: BatchStructure) -> torch.Tensor:
            queries_P, documents_P = structure.positives_P2.unbind(dim=1)
            return torch.nn.functional.cross_entropy(20 * q_QE[queries_P] @ d_DE.T, documents_P)

    @vembed.register_metric
    def first_found(ranked: Any, judged: Any, k: int) -> float:
        return float(any(grade > 0 for grade in ranked[:k]))

    rows = [{"query": f"a {one} {two}", "positive": f"{one[::-1]} {two[::-1]}"} for one in TEXTS for two in TEXTS * 3]
    trainer = vembed.Trainer("builtin:ngram-bag", output_dir=tmp_path / "out", batch_size=8, report_to="none")
    keys: dict[str, Any] = {"max_steps": 2, "bm25": False, "metric_for_best_model": "first_found@3"}
    result = trainer.train(rows, test_data=rows[:9], loss=Softmax, **keys)
    assert result.verdict.comparison.metric == "first_found@3"
    assert "loss_type: session-softmax" in (tmp_path / "out/config.yaml").read_text()
