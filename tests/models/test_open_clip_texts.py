"""Texts of open_clip models: cut where nothing behind can matter, padded elsewhere, with open_clip's own vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.picture_models import OPEN_CLIP_CONFIG, pools_of, vectors
from kit.picture_models import picture as picture_of

from vembed.batch import Composed, ContrastiveBatch, content_id
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE
from vembed.models.open_clip import OpenClipEncoder

CPU = torch.device("cpu")
TOKENIZER = open_clip.SimpleTokenizer()
CONTEXT = 24
END = 49407  # the largest id of open_clip's own vocabulary
TEXTS = [
    "a dog",
    "",
    "a small green house by the river",
    "cat " * 500,  # truncated: fills the context and ends with the end token
    "dog " * (CONTEXT - 2),  # fills it without being truncated
    "!~",  # its first token is 0, what open_clip pads with
    "a dog <end_of_text> that nobody sees",
    "<start_of_text> again",
    "a dog!",
]

# class, text_cfg -> what makes the text tower
CUT = {
    "CLIP": (open_clip.CLIP, {}),
    "CLIP, pooled at eos": (open_clip.CLIP, {"pool_type": "eos", "eos_id": END}),
    "CLIP, pooled at the id of padding": (open_clip.CLIP, {"pool_type": "eos", "eos_id": 0}),
    "CLIP, biased projection": (open_clip.CLIP, {"proj_bias": True}),
    "CustomTextCLIP": (open_clip.CustomTextCLIP, {}),
    "CustomTextCLIP, pooled at eos": (open_clip.CustomTextCLIP, {"pool_type": "eos", "eos_id": END}),
    "CustomTextCLIP, own blocks": (open_clip.CustomTextCLIP, {"scale_attn_inner": True, "scale_fc": True}),
}
PADDED = {
    "CLIP, not causal": (open_clip.CLIP, {"no_causal_mask": True}, "attention isn't causal"),
    "CustomTextCLIP, not causal": (open_clip.CustomTextCLIP, {"no_causal_mask": True}, "attention isn't causal"),
    "CLIP, last token": (open_clip.CLIP, {"pool_type": "last"}, "the tower pools 'last', not the end token"),
    "CustomTextCLIP, last token": (open_clip.CustomTextCLIP, {"pool_type": "last"}, "the tower pools 'last'"),
    "CustomTextCLIP, class token": (open_clip.CustomTextCLIP, {"embed_cls": True}, "a class token behind them"),
}
ALL = {**CUT, **{name: case[:2] for name, case in PADDED.items()}}


def build(name: str, dtype: torch.dtype = torch.float64, **further: Any) -> OpenClipEncoder:
    """Make a model with weights so large that every token matters."""
    model_class, text = ALL[name]
    config = {**OPEN_CLIP_CONFIG, "text_cfg": {**OPEN_CLIP_CONFIG["text_cfg"], **text, **further}}
    torch.manual_seed(0)
    model = model_class(**config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and "logit" not in key:
                parameter.normal_(std=0.2)
    return encoder_of(name, model.to(dtype), config)


def encoder_of(name: str, model: Any, config: dict[str, Any]) -> OpenClipEncoder:
    def preprocess(_: object) -> torch.Tensor:
        return torch.zeros(3, 32, 32)

    parts: dict[str, Any] = {"tokenizer": TOKENIZER, "preprocess": preprocess, "config": config}
    return OpenClipEncoder(name, model=model, weights="", **parts).eval()


def test_cut_texts_are_counted_where_the_end_of_a_text_looks_like_padding() -> None:
    """SigLIP's tokenizers pad with the token that ends a text: 1 here, behind a token for each letter."""

    def tokenizer(texts: list[str], context_length: int) -> torch.Tensor:
        rows = [[*map(ord, text[: context_length - 1]), 1] for text in texts]
        return torch.tensor([row + [1] * (context_length - len(row)) for row in rows])

    encoder = build("CLIP, not causal")
    encoder.tokenizer = tokenizer
    lengths = (1, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT)  # with its end one more
    assert [encoder.featurize_texts(["a" * length], "query").num_truncated for length in lengths] == [0, 0, 0, 1, 1, 1]


@torch.no_grad()
def expected_vectors(encoder: OpenClipEncoder, texts: list[str]) -> torch.Tensor:
    """Run open_clip's own encode_text on what its own tokenizer pads."""
    ids = TOKENIZER([text.strip() for text in texts], context_length=CONTEXT)
    model: Any = encoder.model
    return F.normalize(model.encode_text(ids), dim=-1)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many tokens each text tower is given."""
    seen: list[int] = []
    forward = open_clip.transformer.Transformer.forward

    def recorded(self: Any, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(x.shape[1])
        return forward(self, x, attn_mask=attn_mask)

    monkeypatch.setattr(open_clip.transformer.Transformer, "forward", recorded)
    return seen


@pytest.mark.parametrize("name", ALL)
def test_texts_have_the_vectors_of_open_clip_on_its_padded_ids(name: str) -> None:
    encoder = build(name)
    expected = expected_vectors(encoder, TEXTS)
    distances = torch.cdist(expected, expected) + torch.eye(len(TEXTS))
    if "padding" not in name:  # there every text that fills its row is the same: open_clip pools its first token
        same = (TEXTS.index("a dog"), TEXTS.index("a dog <end_of_text> that nobody sees"))
        if name in CUT:
            assert distances[same] < 1e-12
        distances[same] = distances[same[::-1]] = 1
        assert distances.min() > 1e-3, "texts that all look alike show nothing"
    assert (vectors(encoder, TEXTS) - expected).abs().max() <= 1e-10
    alone = torch.cat([vectors(encoder, [text]) for text in TEXTS])
    assert (alone - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("name", CUT)
def test_causal_towers_that_pool_the_end_token_see_no_padding(name: str, widths: list[int]) -> None:
    encoder = build(name)
    features = encoder.featurize(TEXTS, "query")
    ids = [features.columns["input_ids"].take(np.array([row])).values for row in range(len(TEXTS))]
    if "padding" in name:  # the first padding is pooled, and the first token of a text without any
        assert features.lengths.tolist() == [5, 3, 10, 1, 1, 2, 9, 5, 6]
    else:
        assert features.lengths.tolist() == [4, 2, 9, CONTEXT, CONTEXT, 4, 4, 4, 5]
        assert all(row[-1] == END and END not in row[:-1] for row in ids)
    assert features.num_truncated == 1
    assert encoder.describe()["texts"].startswith("cut to their own length, at most 24 tokens")
    rows = np.array([0, 2])
    for width in (int(features.lengths[rows].max()), 16, 32):
        inputs = encoder.collate(features, rows, width)
        assert inputs["input_ids"].shape == (2, min(width, CONTEXT))
        widths.clear()
        with torch.no_grad():
            found = encoder(inputs)
        assert widths == [min(width, CONTEXT)]
        assert (found - expected_vectors(encoder, [TEXTS[row] for row in rows])).abs().max() <= 1e-10


@pytest.mark.parametrize("name", PADDED)
def test_other_towers_keep_the_padding(name: str, widths: list[int]) -> None:
    encoder = build(name)
    features = encoder.featurize(TEXTS, "query")
    assert set(features.lengths) == {CONTEXT}
    assert features.num_truncated == 1
    assert f"padded to {CONTEXT} tokens" in encoder.describe()["texts"]
    assert PADDED[name][2] in encoder.describe()["texts"]
    vectors(encoder, ["a dog"])
    assert widths == [CONTEXT + ("class token" in name)]


@pytest.mark.parametrize("name", ["CLIP, not causal", "CLIP, last token"])
def test_padding_matters_to_the_towers_that_keep_it(name: str) -> None:
    cut, kept = build("CLIP"), build(name)
    ids = cut.collate(cut.featurize(["a dog"], "query"), np.array([0]), 4)["input_ids"]
    assert cut.causal_texts is not None
    assert kept.causal_texts is None
    model: Any = kept.model
    if model.attn_mask is None:
        model.attn_mask = torch.zeros(CONTEXT, CONTEXT, dtype=torch.float64)
    with torch.no_grad():
        shortened = F.normalize(cut.causal_texts.encode(model, ids), dim=-1)
    assert (shortened - vectors(kept, ["a dog"])).abs().max() > 1e-3


def test_a_mask_that_lets_a_token_see_later_ones_is_not_taken_for_causal() -> None:
    built = build("CLIP")
    model: Any = built.model
    model.attn_mask[0, 5] = 0.0
    encoder = encoder_of("changed", model, built.config)
    assert "attention isn't causal" in encoder.describe()["texts"]
    assert (vectors(encoder, TEXTS) - expected_vectors(encoder, TEXTS)).abs().max() <= 1e-10


def test_a_text_tower_of_another_class_keeps_the_padding() -> None:
    class Wrapped(open_clip.transformer.TextTransformer):  # type: ignore[misc]  # open_clip isn't typed
        pass

    built = build("CustomTextCLIP")
    model: Any = built.model
    model.text.__class__ = Wrapped
    encoder = encoder_of("changed", model, built.config)
    assert encoder.describe()["texts"] == (
        "padded to 24 tokens (the embedding may depend on all of them: CustomTextCLIP with Wrapped)"
    )
    assert (vectors(encoder, TEXTS) - expected_vectors(encoder, TEXTS)).abs().max() <= 1e-10


def test_coca_keeps_the_padding() -> None:
    text = {**OPEN_CLIP_CONFIG["text_cfg"], "embed_cls": True, "output_tokens": True}
    vision = {**OPEN_CLIP_CONFIG["vision_cfg"], "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    config = {
        "embed_dim": 16,
        "vision_cfg": vision,
        "text_cfg": text,
        "multimodal_cfg": {**OPEN_CLIP_CONFIG["text_cfg"]},
    }
    torch.manual_seed(0)
    model = open_clip.CoCa(**config).double().eval()
    encoder = encoder_of("coca", model, config)
    assert set(encoder.featurize(TEXTS, "query").lengths) == {CONTEXT}
    assert encoder.describe()["texts"].endswith("may depend on all of them: CoCa with TextTransformer)")
    assert (vectors(encoder, TEXTS) - expected_vectors(encoder, TEXTS)).abs().max() <= 1e-10


def batch_of(num_queries: int = 9) -> ContrastiveBatch:
    """Give texts of all lengths one picture each; every third query is a picture with a text."""
    texts = [text + str(number) for number, text in enumerate(TEXTS[:num_queries])]
    queries = [Composed((picture_of(50 + n),), text) if n % 3 == 2 else text for n, text in enumerate(texts)]
    documents = [picture_of(number) for number in range(num_queries)]
    return ContrastiveBatch(
        queries=tuple(queries),
        documents=tuple(documents),
        positives_P2=np.stack([np.arange(num_queries)] * 2, axis=1),
        query_ids_Q=np.array([content_id(query) for query in queries]),
        document_ids_D=np.array([content_id(document) for document in documents]),
        record_ids=tuple(range(num_queries)),
    )


def gradients(encoder: OpenClipEncoder) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.zero_grad()
    return found


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    assert largest > 0
    return max(float((found[name] - own).norm() / (own.norm() + 1e-3 * largest)) for name, own in expected.items())


def plain_gradients(encoder: OpenClipEncoder, batch: ContrastiveBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of a step in one graph, with every text padded as open_clip does it."""
    kept, encoder.causal_texts = encoder.causal_texts, None
    loss = InfoNCE(temperature=0.1, bidirectional=True, dtype=torch.float64)
    reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss)
    encoder.causal_texts = kept
    return gradients(encoder)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", ["CLIP", "CLIP, pooled at eos", "CustomTextCLIP"])
def test_the_engine_on_cut_texts_gives_the_gradients_of_padded_ones(
    name: str, checkpointing: bool, widths: list[int]
) -> None:
    encoder = build(name).train()
    batch = batch_of()
    expected = plain_gradients(encoder, batch)
    assert set(widths) == {CONTEXT, encoder.picture_tokens}
    prefix = "model.text." if name.startswith("Custom") else "model."
    assert expected[f"{prefix}positional_embedding"].abs().sum(dim=-1).all(), "a truncated text reaches every position"
    if checkpointing:
        encoder.enable_gradient_checkpointing()
    widths.clear()
    loss = InfoNCE(temperature=0.1, bidirectional=True, dtype=torch.float64)
    options = EngineOptions(ChunkBudget(rows=2, tokens=10_000, bucketed=True), CPU, retain=0.3)
    result = GradCacheEngine(loss, options).step(pools_of(encoder, batch), BatchStructure.of(batch))
    assert result.num_chunks > 6
    assert {4, 5, 10, CONTEXT} <= set(widths)
    assert difference(gradients(encoder), expected) <= 1e-10


def test_positions_that_a_chunk_has_not_got_get_no_gradient_and_stay_parameters() -> None:
    encoder = build("CLIP").train()
    model: Any = encoder.model
    parameter = model.positional_embedding
    features = encoder.featurize(["a dog", "a small dog"], "query")
    encoder(encoder.collate(features, np.arange(2), 5))[0, 0].backward()
    assert model.positional_embedding is parameter
    assert model.positional_embedding.shape == (CONTEXT, 32)
    assert model.attn_mask.shape == (CONTEXT, CONTEXT)
    assert parameter.grad is not None
    assert (parameter.grad.abs().sum(dim=-1) > 0).tolist() == [True] * 4 + [False] * (CONTEXT - 4)


def test_a_failing_call_leaves_the_model_whole() -> None:
    encoder = build("CLIP")
    model: Any = encoder.model
    parameter, expected = model.positional_embedding, vectors(encoder, TEXTS)
    with pytest.raises(IndexError):
        encoder({"input_ids": torch.full((1, 3), 10**6)})
    assert model.positional_embedding is parameter
    assert torch.equal(vectors(encoder, TEXTS), expected)


def test_a_picture_with_a_text_is_padded_to_its_text_alone() -> None:
    encoder = build("CLIP")
    items = [Composed((picture_of(n),), text) for n, text in enumerate(["a dog", "a small green house"])]
    features = encoder.featurize(items, "query")
    assert features.lengths.tolist() == [encoder.picture_tokens + 4, encoder.picture_tokens + 6]
    inputs = encoder.collate(features, np.arange(2), int(features.lengths.max()))
    assert inputs["input_ids"].shape == (2, 6)
