"""One tiny model of every encoder family, written as the folder that its users load.

A new family is one row of `CASES`. Everything else about the contract follows from what the encoder states itself:
its modalities decide the items, `multi_vector` the loss, `forms` the folders that are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kit.late_models import write_bert
from kit.picture_models import (
    EVA_CONFIG,
    TINY,
    VISION_BUILDERS,
    write_open_clip,
    write_picture_model,
)
from kit.text_models import FAMILY_BUILDERS, load_any, wordpiece_tokenizer, write_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from vision_language_cases import FAMILY_BUILDERS as VISION_LANGUAGE_BUILDERS
from vision_language_cases import VISION_LANGUAGE_BUILDERS as QWEN_BUILDERS
from vision_language_cases import write_vision_language

from vembed.models.from_scratch import TinyClip
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.testing.encoders import TEXTS, EncoderCase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vembed.distributed.fsdp import ShardingMode

PROMPTS = {"query": "find: ", "document": "text: "}
FLOAT32 = 1e-6
"""Precision of families whose norms and rotations compute in float32, whatever the type of the weights."""


@dataclass(frozen=True)
class OurCase(EncoderCase):
    """A case of ours, which two ranks run too."""

    sharding: ShardingMode = "sharded"  # of weights over two ranks


def _write_sentence_transformers(folder: Path, *modules: torch.nn.Module, **general: Any) -> None:
    """Write a folder whose layers all do something: biases and norms begin as if they weren't there."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model = SentenceTransformer(modules=list(modules), device="cpu", prompts=PROMPTS, **general)
    model.save(str(folder), create_model_card=False)


def _bert_and(folder: Path, behind: Callable[[], list[torch.nn.Module]], pooling: str = "mean", **options: Any) -> None:
    bare = write_model(folder.with_name("bare-" + folder.name), "bert")
    torch.manual_seed(0)
    _write_sentence_transformers(folder, st.Transformer(str(bare)), st.Pooling(32, pooling, **options), *behind())


def _layer_norm() -> list[torch.nn.Module]:
    return [st.LayerNorm(32)]


def _dense() -> list[torch.nn.Module]:
    return [st.Dense(32, 8), st.Normalize()]


def _residual() -> list[torch.nn.Module]:
    return [st.Dense(32, 32, use_residual=True), st.Normalize()]


def _dense_behind_normalize() -> list[torch.nn.Module]:
    return [st.Normalize(), st.Dense(32, 8)]


def _router(folder: Path) -> None:
    bare = write_model(folder.with_name("bare-" + folder.name), "bert")
    torch.manual_seed(0)
    table = [st.StaticEmbedding(wordpiece_tokenizer(), embedding_dim=32), st.Normalize()]
    transformer = [st.Transformer(str(bare)), st.Pooling(32, "mean")]
    _write_sentence_transformers(folder, st.Router.for_query_document(table, transformer))


def _convolutions(folder: Path) -> None:
    bare = write_model(folder.with_name("bare-" + folder.name), "bert")
    torch.manual_seed(0)
    _write_sentence_transformers(folder, st.Transformer(str(bare)), st.CNN(32, 16, [1, 3]), st.Pooling(32, "mean"))


def _recurrent(folder: Path) -> None:
    torch.manual_seed(0)
    texts = " ".join((*TEXTS, *PROMPTS.values(), "and more of it 0 1 2 3 4"))
    words = ["padding", *sorted({word.strip("?.,") for word in texts.lower().split()})]
    tokenizer = WhitespaceTokenizer(words, stop_words=[], do_lower_case=True)
    table = torch.randn(len(words), 8).numpy()
    lstm = st.LSTM(8, 6, dropout=0.2, num_layers=2)
    _write_sentence_transformers(folder, st.WordEmbeddings(tokenizer, table, True), lstm, st.Pooling(12, "max"))


def _static(folder: Path, *, dense: bool = True, similarity: str = "cosine") -> None:
    torch.manual_seed(0)
    table = st.StaticEmbedding(wordpiece_tokenizer(), embedding_dim=12)
    behind = [*([st.Dense(12, 8)] if dense else []), *([st.Normalize()] if similarity == "cosine" else [])]
    _write_sentence_transformers(folder, table, *behind, similarity_fn_name=similarity)


def _composed(folder: Path, text: str, image: str) -> None:
    towers = {
        "text_model_name": str(write_model(folder.with_name(f"text-{folder.name}"), text)),
        "image_model_name": str(write_picture_model(folder.with_name(f"image-{folder.name}"), image)),
    }
    keys = ModelKeys.model_validate({**towers, "projection_dim": 24, "projection_layers": 2})
    load_encoder(keys).save(folder)


def _builtin(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    load_any(f"builtin:{name}", [f"{text} {number}" for number in range(9) for text in TEXTS]).save(folder)


def _ngram_bag(folder: Path) -> None:
    torch.manual_seed(0)
    bag = NgramBag(NgramBagConfig(dimension=16, buckets=4096, max_words=12))
    torch.nn.init.normal_(bag.weight.weight)
    bag.save(folder)


def _tiny_clip(folder: Path) -> None:
    torch.manual_seed(0)
    TinyClip(TINY).save(folder)


# What a row of a bag takes beside its tokens is shared out over the 7 of the measured rows.
_BAG = 2.6
# The words around a picture cost less than its tokens, and a small picture has few of those.
_CONVERSATION = 2.2
_NEW_HEAD = {"pooling_method": "none", "projection_dim": 12}
_QUERIES = {**_NEW_HEAD, "query_length": 20}
_SMALL_PICTURES = {"query_prompt": "Find it!", "document_prompt": "", "image_tokens": 20, "max_seq_length": 200}
_COMPUTES_IN_FLOAT32 = {"modernbert", "qwen3", "llama", "mistral", "bidirectional gemma3", "t5", "gte", "nomic_bert"}

TEXT = [
    OurCase(
        "text",
        kind,
        partial(write_model, kind=kind),
        near=FLOAT32 if kind in _COMPUTES_IN_FLOAT32 else 1e-9,
        without_gradient="token_type_embeddings",
    )
    for kind in FAMILY_BUILDERS
]

LIBRARY_RUNS = [
    OurCase("sentence_transformers", "layer norm", partial(_bert_and, behind=_layer_norm)),
    # In the other modes every call of a layer is a collective, and a rank may have no documents for their transformer.
    OurCase("sentence_transformers", "router", _router, sharding="fast"),
    OurCase("sentence_transformers", "convolutions", _convolutions, sees_padding=True),
    OurCase("sentence_transformers", "recurrent", _recurrent, estimated=True),  # packs rows by their lengths
    OurCase("sentence_transformers", "residual", partial(_bert_and, behind=_residual)),
    OurCase(
        "sentence_transformers",
        "order, no prompt",
        partial(_bert_and, behind=_dense_behind_normalize, include_prompt=False),
        estimated=True,  # reads the length of the prompt
    ),
]

PICTURES_ALONE = [OurCase("vision", kind, partial(write_picture_model, kind=kind)) for kind in VISION_BUILDERS]

TWO_TOWERS = [
    *(
        OurCase("dual", kind, partial(write_picture_model, kind=kind), **facts)
        for kind, facts in (
            ("clip", {}),
            ("siglip", {"fixed_padding": True}),
            ("siglip2", {"fixed_padding": True, "estimated": True}),  # reads the shapes of its pictures
        )
    ),
    OurCase("open_clip", "clip", write_open_clip),
    OurCase("open_clip", "eva02", partial(write_open_clip, config=EVA_CONFIG)),
    OurCase("composed", "bert + dinov2", partial(_composed, text="bert", image="dinov2")),
    OurCase("composed", "gpt2 + clip", partial(_composed, text="gpt2", image="clip")),
]

VISION_LANGUAGE = [
    OurCase(
        entry,
        kind,
        partial(write_vision_language, kind=kind.partition(",")[0]),
        keys,
        near=FLOAT32,
        pictures_at_most=_CONVERSATION,
    )
    for entry, kind, keys in (
        *(("vision_language", kind, {}) for kind in (*QWEN_BUILDERS, *VISION_LANGUAGE_BUILDERS)),
        ("vision_language", "qwen3_vl, keys", _SMALL_PICTURES),
        ("vision-late", "colpali", {}),
        ("vision-late", "colqwen2", {}),
        ("vision-late", "qwen3_vl", _NEW_HEAD),
        ("vision-late", "colqwen2, topk", {"query_prompt": "Find", "topk_tokens": 6}),
        ("vision-late", "qwen3_vl, pooled", {**_NEW_HEAD, "pool_factor": 2.0}),
    )
]

LATE_INTERACTION = [
    OurCase("colbert", "all tokens", write_bert, _QUERIES),
    OurCase("colbert", "topk, pooled", write_bert, {**_QUERIES, "topk_tokens": 7, "pool_factor": 1.5}),
    OurCase("colbert", "pooled", write_bert, {**_QUERIES, "pool_factor": 2.0}),
    OurCase("colbert", "not filled up", write_bert, {**_QUERIES, "query_expansion": False}),
    *(
        OurCase("colbert", kind, partial(write_model, kind=kind), _QUERIES, near=FLOAT32)
        for kind in ("roberta", "qwen3", "t5")
    ),
    *(
        OurCase("patches", kind, partial(write_picture_model, kind=kind), _NEW_HEAD)
        for kind in ("dinov2", "dinov3", "mae")
    ),
    OurCase("patches", "dinov2, topk", partial(write_picture_model, kind="dinov2"), {**_NEW_HEAD, "topk_tokens": 5}),
    OurCase("patches", "vit, pooled", partial(write_picture_model, kind="vit"), {**_NEW_HEAD, "pool_factor": 3.0}),
]

OUR_OWN = [
    OurCase("ngram-bag", "", _ngram_bag, texts_at_most=_BAG),
    OurCase("tiny-clip", "", _tiny_clip, texts_at_most=1.2),
    OurCase("tiny-transformer", "", partial(_builtin, name="tiny-transformer")),
    OurCase("tiny-qwen3-vl", "", partial(_builtin, name="tiny-qwen3-vl"), near=FLOAT32, pictures_at_most=_CONVERSATION),
]

CASES: tuple[OurCase, ...] = (
    *TEXT,
    OurCase(
        "text",
        "bert, prompts, dense",
        partial(_bert_and, behind=_dense, pooling="cls"),
        without_gradient="token_type_embeddings",
    ),
    OurCase(
        "text",
        "bert, short",
        partial(write_model, kind="bert"),
        {"max_seq_length": 9},
        without_gradient="token_type_embeddings",
    ),
    *LIBRARY_RUNS,
    OurCase("static", "table, dense", _static, texts_at_most=_BAG),
    OurCase("static", "short", partial(_static, dense=False), {"max_seq_length": 9}, texts_at_most=_BAG),
    OurCase("static", "dot product", partial(_static, dense=False, similarity="dot"), texts_at_most=_BAG),
    *PICTURES_ALONE,
    *TWO_TOWERS,
    *VISION_LANGUAGE,
    *LATE_INTERACTION,
    *OUR_OWN,
)
"""The first case of each entry runs by default, all of them with `-m ""`."""
