"""Small random transformers for late interaction, as ordinary folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from model_cases import POSITIONS, wordpiece_tokenizer
from test_engine_vectors import MaxSim
from transformers import BertConfig, BertModel

from vembed.batch import ContrastiveBatch
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vembed.batch import Item
    from vembed.gradcache.calls import Pool
    from vembed.models.encoder import Encoder

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


def batch_of(queries: Sequence[Item], documents: Sequence[Item]) -> ContrastiveBatch:
    """Return a batch in which the document of its own number is a query's positive."""
    numbers = np.arange(len(queries))
    return ContrastiveBatch(
        queries=tuple(queries),
        documents=tuple(documents),
        positives_P2=np.stack([numbers, numbers], axis=1),
        query_ids_Q=numbers,
        document_ids_D=np.arange(len(documents)) + 100,
        record_ids=tuple(range(len(queries))),
    )


def assert_engine_is_exact(
    make: Callable[[], Encoder],
    pools_of: Callable[[Any], list[Pool]],
    batch: ContrastiveBatch,
    *,
    rows: int,
    of_largest: float | None = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Fail unless a step in chunks has value and gradients of the plain one; return the gradients and how many chunks.

    Args:
        make: Makes the encoder, in float64; each of the two steps takes a new one.
        rows: Rows per chunk.
        of_largest: Most that a gradient may differ, as a share of the largest; by default each number is compared.
    """
    budget, found = ChunkBudget(rows, 10**6), []
    for plain in (True, False):
        encoder = make().train()
        pools, structure, loss = pools_of(encoder), BatchStructure.of(batch), MaxSim()
        torch.manual_seed(5)
        if plain:
            value = reference_step(pools, structure, loss, budget=budget).item()
        else:
            result = GradCacheEngine(loss, EngineOptions(budget, torch.device("cpu"))).step(pools, structure)
            assert result.replay_drift == 0
            value = result.loss
        found.append((value, {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}))
    (expected, wanted), (value, gradients) = found
    assert value == pytest.approx(expected, rel=1e-12)
    assert wanted.keys() == gradients.keys()
    largest = max(gradient.norm() for gradient in wanted.values())
    for name, gradient in wanted.items():
        if of_largest is None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)
        else:
            assert (gradients[name] - gradient).norm() <= of_largest * largest, name
    return wanted, result.num_chunks
