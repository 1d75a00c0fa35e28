"""Small random transformers for late interaction, as ordinary folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import BertConfig, BertModel

from kit.text_models import POSITIONS, wordpiece_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


HIDDEN = 32
DIMENSION = 16
QUERY_LENGTH = 20
QUERIES = ("the river?", "sea", "!", "how do i sort a list in place? use list.sort, it returns None")
DOCUMENTS = ("The river, (it says) runs to the sea!", "a b", "...", "Sort it: list.sort(). It returns None.", "c")
"""Of unequal lengths, with punctuation; one is nothing else, and one query is longer than QUERY_LENGTH."""


def write_bert(folder: Path) -> Path:
    """Write a bare BERT with seeded weights whose tokenizer has a mask token."""
    torch.manual_seed(0)
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        pad_token_id=0,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(encoder: Any, texts: tuple[str, ...], side: str, *, width: int | None = None) -> list[torch.Tensor]:
    """Encode texts in one call and return the vectors of each."""
    features = encoder.featurize(texts, side)
    rows = torch.arange(len(texts)).numpy()
    with torch.no_grad():
        z = encoder(encoder.collate(features, rows, width or int(features.lengths.max())))
    return list(z.split(encoder.num_vectors(features).tolist()))
