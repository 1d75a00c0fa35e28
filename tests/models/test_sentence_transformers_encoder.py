"""Models that sentence-transformers runs: its vectors, exact gradients through the engine, its folder back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import BUDGET, CPU, make_loss, partly_trained, step_of_a_rank, text_batch, trainable_of, wake
from model_cases import TEXTS, byte_tokenizer, edit_json, embed, load_any, write_model
from picture_cases import pools_of
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
    WordEmbeddings,
)
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from test_adapters_engine import assert_exact, assert_same, take

from vembed.batch import Features
from vembed.errors import ConfigError
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, Pool
from vembed.gradcache.reference import reference_step
from vembed.gradcache.row_assignment import RowAssignment
from vembed.losses.base import BatchStructure
from vembed.models.adapters.lora import merge_adapters
from vembed.models.keys import ModelKeys
from vembed.models.profile.measure import ProfileTarget
from vembed.models.profile.profile import profile_model
from vembed.models.st_library import SentenceTransformersEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from rank_pool import RankPool

PROMPTS = {"query": "find: ", "document": "text: "}
LONG = (*TEXTS, "word " * 80)


def _words() -> list[torch.nn.Module]:
    words = [
        "padding",
        *sorted({word.strip("?.,") for text in (*LONG, "find text more of it") for word in text.lower().split()}),
    ]
    table = np.random.default_rng(0).normal(size=(len(words), 8)).astype(np.float32)
    embeddings = WordEmbeddings(WhitespaceTokenizer(words, stop_words=[], do_lower_case=True), table, True)
    return [embeddings, LSTM(8, 6, dropout=0.2, num_layers=2), Pooling(12, "max")]


def _modules(kind: str, bare: Path) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    transformer = [Transformer(str(bare)), Pooling(32, "mean", include_prompt="prompt" not in kind)]
    if kind == "words":
        return _words()
    if kind == "router":
        short = [StaticEmbedding(byte_tokenizer(), embedding_dim=32), Normalize()]
        return [Router.for_query_document(short, transformer)]
    if kind == "convolutions":
        return [transformer[0], CNN(32, 16, [1, 3]), Pooling(32, "mean")]
    behind = {"layer norm": [LayerNorm(32)], "residual": [Dense(32, 32, use_residual=True), Normalize()]}
    return [*transformer, *behind.get(kind, [Normalize(), Dense(32, 8)])]


KINDS = ("layer norm", "residual", "order and prompt", "words", "router", "convolutions")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("library")
    bare = write_model(root / "bare", "bert")
    for kind in KINDS:
        modules = _modules(kind, bare)
        for module in modules:  # a layer norm begins as one that does nothing
            for parameter in module.parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
        made = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS)
        made.save(str(root / kind.replace(" ", "-")), create_model_card=False)
    return {kind: root / kind.replace(" ", "-") for kind in KINDS}


def load(folder: Path, **keys: Any) -> SentenceTransformersEncoder:
    encoder = load_any(folder, **keys)
    assert isinstance(encoder, SentenceTransformersEncoder)
    return encoder.eval()


def assert_same_vectors(theirs: SentenceTransformer, ours: SentenceTransformersEncoder) -> None:
    for side, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = torch.nn.functional.normalize(encode(list(LONG), convert_to_tensor=True), dim=-1)
        assert (embed(ours, LONG, side=side) - expected).abs().max() <= 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_librarys_vectors_and_writes_its_folder(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    theirs, ours = SentenceTransformer(str(folders[kind]), device="cpu"), load(folders[kind])
    assert_same_vectors(theirs, ours)
    assert ours.prompts == PROMPTS
    assert ours.dimension == embed(ours).shape[1]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    ours.save(tmp_path)
    assert torch.equal(embed(load(tmp_path)), embed(ours))
    assert_same_vectors(SentenceTransformer(str(tmp_path), device="cpu"), ours)


@pytest.mark.parametrize("kind", KINDS[:-1])  # convolutions see the padding
def test_batches_orders_and_sides_of_a_chunk_change_nothing(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], dtype=torch.float64)
    sides = [encoder.featurize(TEXTS, side) for side in ("query", "document")]
    features = Features.concat(sides)
    rows = np.array([7, 0, 3, 9, 1, 8])
    with torch.no_grad():
        mixed = encoder(encoder.collate(features, rows, 60))
        alone = torch.cat([encoder(encoder.collate(features, rows[each : each + 1], 60)) for each in range(6)])
    assert torch.allclose(mixed, alone, atol=1e-9)
    assert (embed(encoder, side="query") - embed(encoder, side="document")).abs().max() > 1e-3
    assert torch.pdist(embed(encoder, TEXTS[1:3])).min() > 1e-3


def both_sides(encoder: SentenceTransformersEncoder) -> list[Pool]:
    batch = text_batch()
    queries, documents = encoder.featurize(batch.queries, "query"), encoder.featurize(batch.documents, "document")
    features = Features.concat([queries, documents])
    return [Pool(encoder, encoder.collate, features, np.arange(10))]


@pytest.mark.parametrize("kind", ["layer norm", "order and prompt", "words", "router", "convolutions"])
def test_the_engine_has_the_gradients_of_the_plain_step_with_dropout(folders: dict[str, Path], kind: str) -> None:
    encoder, loss = load(folders[kind], dtype=torch.float64).train(), make_loss()
    pools, structure = both_sides(encoder), BatchStructure.of(text_batch())
    torch.manual_seed(5)
    value = reference_step(pools, structure, loss, budget=BUDGET)
    expected = take(encoder, loss)
    assert len(expected) > 4
    for retain in (0.0, 0.5):
        torch.manual_seed(5)
        engine = GradCacheEngine(loss, EngineOptions(BUDGET, CPU, retain=retain), list(trainable_of(encoder).values()))
        result = engine.step(pools, structure)
        assert result.num_chunks >= 5
        assert result.loss == pytest.approx(value.item(), rel=1e-12)
        assert result.replay_drift == 0
        assert_same(take(encoder, loss), expected)
    if kind == "layer norm":
        torch.manual_seed(6)
        assert reference_step(pools, structure, loss, budget=BUDGET).item() != pytest.approx(value.item(), rel=1e-6)


def test_adapters_train_and_are_merged_into_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = partly_trained(folders["layer norm"], "lora")
    wake(encoder)
    assert_exact(encoder, text_batch())
    adapted = embed(encoder.eval())
    merge_adapters(encoder)
    encoder.save(tmp_path)
    assert torch.allclose(embed(load(tmp_path, dtype=torch.float64)), adapted, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "fast", "sharded"])
def test_two_ranks_have_the_gradients_of_one(two_ranks: RankPool, folders: dict[str, Path], mode: Any) -> None:
    folder = folders["layer norm"]
    encoder, loss, batch = load(folder, dtype=torch.float64), make_loss(), text_batch()
    value = reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss)
    expected = take(encoder, loss)
    assignment = RowAssignment((np.array([0, 2, 5, 6]), np.array([1, 3, 4, 7, 8, 9])))
    for found_value, found, _ in two_ranks.run(step_of_a_rank, folder, "eval", assignment, batch, mode):
        assert found_value == pytest.approx(value.item(), rel=1e-11)
        assert_same(found, {name: expected[name] for name in expected.keys() - {"log_scale"}})


@pytest.mark.parametrize("kind", ["layer norm", "words"])
def test_the_plan_counts_it(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    size = profile_model(ModelKeys(model_name=str(folders[kind])), ProfileTarget("cpu"))
    assert size.num_parameters == sum(parameter.numel() for parameter in encoder.parameters())
    assert size.estimated == (kind == "words")  # an LSTM packs its rows by their lengths, which are values


def test_the_plan_and_the_message_say_why_the_library_runs_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "LayerNorm, which vembed doesn't run"
    encoder = load(folders["layer norm"])
    assert why in encoder.describe()["why"]
    assert "Transformer + Pooling + LayerNorm" in encoder.describe()["family"]
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=rf"{why}.*pip install vembed\[st\]"):
        load(folders["layer norm"])


def test_what_the_library_cant_run_either_is_refused_with_both_reasons(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    load(folders["residual"]).save(tmp_path)
    dense = next(tmp_path.glob("*Dense"))
    weights = dense / "model.safetensors"
    edit_json(dense / "config.json", in_features=7)
    with pytest.raises(ConfigError, match=r"a residual connection.*sentence-transformers can't run it either"):
        load(tmp_path)
    edit_json(dense / "config.json", in_features=32, activation_function="os.system")
    with pytest.raises(ConfigError, match=r"a residual connection; known activations"):
        load(tmp_path)
    edit_json(dense / "config.json", activation_function="torch.nn.modules.activation.Tanh")
    (dense / "pytorch_model.bin").write_bytes(weights.read_bytes())
    weights.unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle.*allow_pickle: true"):
        load(tmp_path)


def test_prompts_may_be_given(folders: dict[str, Path], tmp_path: Path) -> None:
    given = load(folders["residual"], prompts={"query": "look: ", "document": ""})
    assert torch.allclose(embed(given, ["sea"]), embed(given, ["look: sea"], side="document"), atol=1e-6)
    given.save(tmp_path)
    assert load(tmp_path).prompts == {"query": "look: ", "document": ""}


def test_a_folder_may_name_no_prompts(folders: dict[str, Path], tmp_path: Path) -> None:
    load(folders["residual"]).save(tmp_path)
    settings = tmp_path / "config_sentence_transformers.json"
    edit_json(settings, prompts={})
    assert load(tmp_path).prompts == {"query": "", "document": ""}
    names = load(tmp_path).state_dict()
    assert len({each.data_ptr() for each in names.values()}) == len(names)
    settings.unlink()
    assert load(tmp_path).prompts == {"query": "", "document": ""}
