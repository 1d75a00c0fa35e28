"""A small BERT from scratch, with a tokenizer trained on the data it will see.

It is an ordinary transformers model: what is exported loads anywhere. The tokenizer is a byte-level BPE: no text holds
an unknown token, and the same texts always give the same vocabulary. (The library's WordPiece trainer numbers the
pieces inside of words in the order of a randomly seeded hash table, and breaks ties by those numbers.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from vembed.models.text import TextEncoder, TextSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_SIZE = 8192
MAX_LENGTH = 128


def build_tiny_transformer(texts: Iterable[str], *, name: str, dtype: torch.dtype) -> TextEncoder:
    """Train a tokenizer and initialise a transformer of 4 layers x 256.

    Args:
        texts: Training texts; only the tokenizer sees them.
        name: What it is called.
        dtype: Type of the weights.

    Returns:
        An untrained encoder; its weights follow torch's global generator.
    """
    tokenizer = _train_tokenizer(texts)
    assert isinstance(tokenizer.pad_token_id, int)
    config = tiny_config(len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    backbone = BertModel(config, add_pooling_layer=False)
    origin = {"pooling": "built in", "max_seq_length": "built in"}
    spec = TextSpec(pooling=("mean",), max_length=MAX_LENGTH, origin=origin)
    return TextEncoder(name, backbone=backbone, tokenizer=tokenizer, spec=spec).to(dtype)


def tiny_config(vocabulary_size: int = VOCABULARY_SIZE, *, pad_token_id: int = 0) -> BertConfig:
    """Return the shape of the transformer.

    Args:
        vocabulary_size: Of its tokenizer; few texts give a smaller one.
        pad_token_id: Of its tokenizer.
    """
    return BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=pad_token_id,
    )


def _train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts, lower-cased, with BERT's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}  # the trainer numbers them first
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_LENGTH,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
