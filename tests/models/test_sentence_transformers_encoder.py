"""Models that sentence-transformers runs: its vectors, exact gradients through the engine, its folder back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.text_models import TEXTS, byte_tokenizer, edit_json, embed, load_any, write_model
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

from vembed.errors import ConfigError
from vembed.models.st_library import SentenceTransformersEncoder

if TYPE_CHECKING:
    from pathlib import Path


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
