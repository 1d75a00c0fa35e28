"""A table of token vectors: sentence-transformers' own vectors, exact gradients, the same folder back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_cases import CPU, make_loss, take, text_batch
from kit.picture_models import pools_of
from kit.text_models import TEXTS, embed, load_any, wordpiece_tokenizer
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding

from vembed.errors import ConfigError
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.models.adapters import freeze
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model
from vembed.models.tables import StaticEncoder

if TYPE_CHECKING:
    from pathlib import Path


PROMPTS = {"query": "find: ", "document": ""}


def written(folder: Path, *behind: torch.nn.Module, **general: Any) -> SentenceTransformer:
    """Let sentence-transformers write a table of 192 tokens x 12, and load it back as its users do."""
    torch.manual_seed(0)
    table = StaticEmbedding(wordpiece_tokenizer(), embedding_dim=12)
    SentenceTransformer(modules=[table, *behind], device="cpu", **general).save(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a dense layer and prompts."""
    folder = tmp_path_factory.mktemp("static") / "model"
    torch.manual_seed(1)
    written(folder, Dense(12, 8), Normalize(), prompts=PROMPTS)
    return folder


def load(name: Path | str, **keys: Any) -> StaticEncoder:
    encoder = load_any(name, **keys)
    assert isinstance(encoder, StaticEncoder)
    return encoder.eval()


def assert_same_vectors(
    theirs: SentenceTransformer, ours: StaticEncoder, texts: tuple[str, ...] = (*TEXTS, "")
) -> None:
    for side, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = encode(list(texts), convert_to_tensor=True)
        assert (embed(ours, texts, side=side) - expected).abs().max() <= 1e-5  # type: ignore[arg-type]


def test_a_model_of_model2vec_shares_and_weights_its_rows(tmp_path: Path) -> None:
    written(tmp_path / "model", Normalize())
    path = tmp_path / "model" / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "embeddings": torch.randn(50, 12, generator=generator),
        "mapping": torch.randint(0, 50, (192,), generator=generator),
        "weights": torch.rand(192, generator=generator),
    }
    save_file(tensors, path)
    assert_same_vectors(SentenceTransformer(str(tmp_path / "model"), device="cpu"), load(tmp_path / "model"))


def test_vectors_are_cut_to_the_dimensions_that_a_folder_names(tmp_path: Path) -> None:
    theirs = written(tmp_path / "model", truncate_dim=5)
    load(tmp_path / "model").save(tmp_path / "saved")
    for name in ("model", "saved"):
        ours = load(tmp_path / name)
        assert ours.dimension == 5
        expected = theirs.encode(list(TEXTS), convert_to_tensor=True, normalize_embeddings=True)
        assert (embed(ours) - expected).abs().max() <= 1e-5
    written(tmp_path / "dot", Normalize(), truncate_dim=5, similarity_fn_name="dot")
    with pytest.raises(ConfigError, match="truncate_dim"):
        load(tmp_path / "dot")


def test_rows_that_no_text_names_have_no_gradient_and_a_frozen_table_has_none(folder: Path) -> None:
    batch, loss = text_batch(), make_loss()
    encoder = load(folder, dtype=torch.float64).train()
    pools = pools_of(encoder, batch)
    reference_step(pools, BatchStructure.of(batch), loss)
    rows = set(take(encoder, loss)["table.weight"].abs().sum(dim=1).nonzero().flatten().tolist())
    assert rows == set(pools[0].features.columns["input_ids"].values.tolist())
    freeze(encoder, "projection")
    reference_step(pools, BatchStructure.of(batch), loss)
    assert take(encoder, loss).keys() == {"dense.0.linear.weight", "dense.0.linear.bias", "log_scale"}


def test_a_table_pads_nothing(folder: Path) -> None:
    encoder, structure, budget = load(folder), BatchStructure.of(text_batch()), ChunkBudget(rows=100, tokens=10**6)
    (pool,) = pools_of(encoder, text_batch())
    engine = GradCacheEngine(make_loss(), EngineOptions(budget, CPU))
    result = engine.step([replace(pool, packs=encoder.packs)], structure)
    assert result.padded_tokens == pool.features.lengths.sum()


def test_prompts_may_be_given(folder: Path) -> None:
    given = load(folder, prompts={"query": "look: "})
    assert given.prompts == {"query": "look: ", "document": ""}
    assert torch.equal(embed(given, ["sea"]), embed(given, ["look: sea"], side="document"))


def test_one_from_scratch_trains_a_tokenizer_and_the_plan_knows_its_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = load_any("builtin:static", [f"{text} {number}" for number in range(9) for text in TEXTS]).eval()
    assert embed(encoder).shape == (len(TEXTS), 256)
    encoder.save(tmp_path)
    assert torch.equal(embed(load(tmp_path)), embed(encoder))
    target = ProfileTarget("cpu")
    size = profile_model(ModelKeys(model_name="builtin:static"), target)
    assert (size.num_parameters, size.estimated) == (32_768 * 256, False)
    assert profile_model(ModelKeys(model_name=str(tmp_path)), target).num_parameters == encoder.table.weight.numel()  # type: ignore[union-attr,operator]
    empty = load_encoder(ModelKeys(model_name=str(tmp_path)), with_weights=False)
    assert empty.table.weight.is_meta  # type: ignore[union-attr]
    assert empty.featurize(TEXTS, "query").lengths.tolist() == encoder.featurize(TEXTS, "query").lengths.tolist()


def test_what_isnt_understood_is_refused(folder: Path, tmp_path: Path) -> None:
    load(folder).save(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text("utf-8"))
    extra = {"idx": 3, "name": "3", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"}
    (tmp_path / "modules.json").write_text(json.dumps([*modules, extra]), "utf-8")
    with pytest.raises(ConfigError, match="Dropout, which vembed doesn't run"):
        load(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules), "utf-8")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"its StaticEmbedding has no model\.safetensors"):
        load(tmp_path)
