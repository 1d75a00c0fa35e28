"""Small real encoders in float64 and batches of uneven lengths."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.gradcache.engine import Pool
from vembed.losses.base import BatchStructure

VOCABULARY = 60


class SmallBert(torch.nn.Module):
    """A BERT of 2 layers x 16 with mean pooling, as the engine's callables see an encoder."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def collate(self, features: Features, rows: Any, width: int) -> dict[str, torch.Tensor]:
        ids = features.columns["input_ids"].take(rows)
        mask = np.arange(width) < ids.lengths[:, None]
        return {"ids": torch.from_numpy(ids.padded(width, 0)).long(), "mask": torch.from_numpy(mask)}

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = inputs["mask"]
        hidden = self.bert(inputs["ids"], attention_mask=mask.long()).last_hidden_state
        pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(pooled, dim=-1)


@dataclass
class Case:
    """A batch, its pools and the modules that make its embeddings."""

    encoder: torch.nn.Module
    pools: list[Pool]
    structure: BatchStructure


def random_features(count: int, rng: np.random.Generator) -> Features:
    lengths = np.minimum(40, rng.lognormal(np.log(8), 0.7, count).astype(np.int64) + 2)
    ids = Ragged.from_rows([rng.integers(5, VOCABULARY, length) for length in lengths])
    return Features({"input_ids": ids}, ids.lengths)


def random_batch(num_queries: int, negatives: list[int], rng: np.random.Generator) -> ContrastiveBatch:
    """Give query i one positive and negatives[i] hard negatives; the second positive repeats the first."""
    positives, hard, row = [], [], 0
    for query in range(num_queries):
        positives.append((query, row))
        hard += [(query, row + 1 + place) for place in range(negatives[query])]
        row += 1 + negatives[query]
    document_ids = np.arange(1000, 1000 + row)
    document_ids[positives[1][1]] = document_ids[positives[0][1]]
    return ContrastiveBatch(
        queries=("",) * num_queries,
        documents=("",) * row,
        positives_P2=np.array(positives, dtype=np.int64),
        query_ids_Q=np.arange(num_queries, dtype=np.int64),
        document_ids_D=document_ids.astype(np.int64),
        record_ids=tuple(range(num_queries)),
        negatives_P2=np.array(hard, dtype=np.int64) if hard else None,
    )


def make_case(*, dropout: float, negatives: list[int] | int, towers: int = 1, num_queries: int = 9) -> Case:
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    counts = [negatives] * num_queries if isinstance(negatives, int) else negatives
    batch = random_batch(num_queries, counts, rng)
    num_documents = len(batch.documents)
    encoders = torch.nn.ModuleList([SmallBert(dropout).double().train() for _ in range(towers)])
    queries, documents = random_features(num_queries, rng), random_features(num_documents, rng)
    query_slots, document_slots = np.arange(num_queries), num_queries + np.arange(num_documents)
    first, last = encoders[0], encoders[-1]
    if towers == 1:
        slots = np.concatenate([query_slots, document_slots])
        pools = [Pool(first, first.collate, Features.concat([queries, documents]), slots)]
    else:
        pools = [
            Pool(first, first.collate, queries, query_slots),
            Pool(last, last.collate, documents, document_slots),
        ]
    return Case(encoders, pools, BatchStructure.of(batch))


class Limited(torch.nn.Module):
    """An encoder whose memory ends at a number of rows, in the forward pass or in the backward pass."""

    def __init__(self, encoder: torch.nn.Module, most_rows: int, where: str) -> None:
        super().__init__()
        self.encoder, self.most_rows, self.where = encoder, most_rows, where
        self.calls = 0

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        z: torch.Tensor = self.encoder(inputs)
        if len(z) <= self.most_rows:
            return z
        if self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        z = z * 1.0  # a sharded encoder has hooks of its own on what it returns
        if z.requires_grad:
            z.register_hook(self._fail)
        return z

    def _fail(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
