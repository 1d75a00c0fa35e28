"""Tiny models of every family, built from their configs and written as ordinary folders."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaModel,
    XLNetConfig,
    XLNetModel,
)

from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vembed.batch import ImageLimits, Side
    from vembed.models.encoder import Encoder

POSITIONS = 64

TEXTS = (
    "sea",
    "The river runs to the sea.",
    "how do I sort a list in place? use list.sort",
    "a b",
    "Sea",
)
"""Of unequal lengths, all under POSITIONS tokens of either tokenizer."""


def wordpiece_tokenizer(*, lower_case: bool = True) -> PreTrainedTokenizerFast:
    """Return a BERT tokenizer whose word pieces are single characters."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *characters, *(f"##{character}" for character in characters)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def byte_tokenizer(
    *, start: bool = False, end: bool = False, pad: bool = True, **extra: Any
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges.

    Args:
        start: Whether <s> (id 0) is put before each text.
        end: Whether </s> (id 2) is put behind each text.
        pad: Whether it names <pad> (id 1) as its pad token.
        extra: Further arguments of PreTrainedTokenizerFast.
    """
    specials = ["<s>", "<pad>", "</s>"]
    vocabulary = {piece: index for index, piece in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if start or end:
        template = " ".join(["<s>"] * start + ["$A"] + ["</s>"] * end)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    named = {"bos_token": "<s>", "eos_token": "</s>", **({"pad_token": "<pad>"} if pad else {}), **extra}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **named)


_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.3,  # the usual 0.02 gives all texts nearly the same vector
}
_WORDPIECE_SHAPE = {**_SHAPE, "vocab_size": 192, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
_BYTE_SHAPE = {**_SHAPE, "vocab_size": 259, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_DECODER_SHAPE = {**_BYTE_SHAPE, "max_position_embeddings": POSITIONS, "num_key_value_heads": 1, "head_dim": 16}


def _bert() -> tuple[Any, Any]:
    return BertModel(BertConfig(**_WORDPIECE_SHAPE)), wordpiece_tokenizer()


def _roberta() -> tuple[Any, Any]:
    config = RobertaConfig(**_BYTE_SHAPE, max_position_embeddings=POSITIONS + 2)
    return RobertaModel(config), byte_tokenizer(start=True, end=True)


def _xlm_roberta() -> tuple[Any, Any]:
    config = XLMRobertaConfig(**_BYTE_SHAPE, max_position_embeddings=POSITIONS + 2)
    return XLMRobertaModel(config), byte_tokenizer(start=True, end=True)


def _nomic_bert() -> tuple[Any, Any]:
    from transformers import NomicBertConfig, NomicBertModel  # not in the oldest transformers that we take

    return NomicBertModel(NomicBertConfig(**_WORDPIECE_SHAPE)), wordpiece_tokenizer()


def _gte() -> tuple[Any, Any]:
    from transformers import GteConfig, GteModel  # likewise

    config = GteConfig(**_BYTE_SHAPE, max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0)
    return GteModel(config), byte_tokenizer(start=True, end=True)


def _modernbert() -> tuple[Any, Any]:
    config = ModernBertConfig(**_WORDPIECE_SHAPE, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3)
    return ModernBertModel(config), wordpiece_tokenizer()


def _qwen3() -> tuple[Any, Any]:
    return Qwen3Model(Qwen3Config(**_DECODER_SHAPE)), byte_tokenizer(end=True, padding_side="left")


def _mistral() -> tuple[Any, Any]:
    return MistralModel(MistralConfig(**_DECODER_SHAPE, sliding_window=12)), byte_tokenizer(start=True, end=True)


def _llama() -> tuple[Any, Any]:
    return LlamaModel(LlamaConfig(**_DECODER_SHAPE)), byte_tokenizer(start=True)


def _gpt2() -> tuple[Any, Any]:
    config = GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS, initializer_range=0.3, bos_token_id=0,
        eos_token_id=2,
    )  # fmt: skip
    return GPT2Model(config), byte_tokenizer()


def _t5() -> tuple[Any, Any]:
    config = T5Config(
        vocab_size=259, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return T5EncoderModel(config), byte_tokenizer(end=True)


def _bidirectional_gemma3() -> tuple[Any, Any]:
    config = Gemma3TextConfig(**_DECODER_SHAPE, use_bidirectional_attention=True)
    return Gemma3TextModel(config), byte_tokenizer(start=True, end=True)


def _gemma3() -> tuple[Any, Any]:
    return Gemma3TextModel(Gemma3TextConfig(**_DECODER_SHAPE)), byte_tokenizer(start=True, end=True)


def _mpnet() -> tuple[Any, Any]:
    config = MPNetConfig(**_BYTE_SHAPE, max_position_embeddings=POSITIONS + 2)
    return MPNetModel(config), byte_tokenizer(start=True, end=True)


def _gemma2() -> tuple[Any, Any]:
    config = Gemma2Config(**_DECODER_SHAPE, attn_logit_softcapping=0.5)
    return Gemma2Model(config), byte_tokenizer(start=True, end=True)


def _xlnet() -> tuple[Any, Any]:
    return XLNetModel(XLNetConfig(vocab_size=192, d_model=32, n_layer=2, n_head=2, d_inner=64)), wordpiece_tokenizer()


FAMILY_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
    "modernbert": _modernbert,
    "nomic_bert": _nomic_bert,
    "gte": _gte,
    "qwen3": _qwen3,
    "llama": _llama,
    "mistral": _mistral,
    "gpt2": _gpt2,
    "t5": _t5,
    "bidirectional gemma3": _bidirectional_gemma3,
}

OTHER_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma2": _gemma2, "gemma3": _gemma3, "mpnet": _mpnet, "xlnet": _xlnet,
}  # fmt: skip
"""Families with a test of their own."""

POOLING = {
    **dict.fromkeys(FAMILY_BUILDERS, "mean"),
    **dict.fromkeys(("qwen3", "llama", "mistral", "gpt2"), "lasttoken"),
}
"""What each family is pooled with."""


def write_model(folder: Path, kind: str, *, tokenizer: Any = None, **changes: Any) -> Path:
    """Write a bare transformers folder with seeded weights.

    Args:
        folder: Where to.
        kind: A key of FAMILY_BUILDERS or OTHER_BUILDERS.
        tokenizer: Instead of the family's.
        changes: Of its config.
    """
    torch.manual_seed(0)
    model, own_tokenizer = (FAMILY_BUILDERS | OTHER_BUILDERS)[kind]()
    if changes:
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **changes}))
    model.save_pretrained(folder)
    (own_tokenizer if tokenizer is None else tokenizer).save_pretrained(folder)
    return folder


def load_any(
    name: Path | str, texts: Sequence[str] = (), *, image_limits: ImageLimits | None = None, **keys: Any
) -> Encoder:
    """Load an encoder.

    Args:
        name: A folder, or another name.
        texts: Training texts.
        image_limits: What a picture may be.
        keys: Keys of the model; `dtype`, a torch type, and `prompts` by side stand for theirs; or load_in_4bit.
    """
    four_bits = keys.pop("load_in_4bit", False)
    keys["torch_dtype"] = str(keys.pop("dtype", torch.float32)).removeprefix("torch.")
    keys |= {f"{side}_prompt": prompt for side, prompt in keys.pop("prompts", {}).items()}
    options = ModelKeys(model_name=str(name), **keys)
    return load_encoder(options, texts, image_limits=image_limits, load_in_4bit=four_bits)


def load(folder: Path | str, **keys: Any) -> TextEncoder:
    """Load a text encoder without dropout."""
    encoder = load_any(folder, **keys)
    assert isinstance(encoder, TextEncoder)
    return encoder.eval()


@torch.no_grad()
def embed(encoder: Encoder, texts: Sequence[str] = TEXTS, *, side: Side = "query", width: int | None = None) -> Any:
    """Encode texts in one chunk, padded to the longest or to a width."""
    features = encoder.featurize(texts, side)
    longest = max(1, int(features.lengths.max()))
    return encoder(encoder.collate(features, np.arange(len(texts)), width or longest))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), "utf-8")


def write_cross_encoder(folder: Path, words: Sequence[str]) -> Path:
    """Write a BERT of random weights that gives a pair of texts one score."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=32, **names).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(
        vocab_size=len(vocabulary), max_position_embeddings=32, num_labels=1, initializer_range=0.5, **size
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder
