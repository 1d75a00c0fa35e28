"""The model and the batch that `engine.py` and its neighbours compare steps on."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure import measure

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.gradcache.engine import Pool
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    import argparse

SHAPES = {"small": (6, 384, 12), "minilm": (6, 384, 12), "bert-base": (12, 768, 12)}
"""Layers, width and heads of the encoder."""

VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class Workload:
    """One model and one batch, in the forms that the trainers take.

    Attributes:
        device: Where the step runs.
        encoder: The model as vembed loads it.
        peer: The same weights as a SentenceTransformer.
        columns: Token ids of the queries and of the documents.
        autocast: Type of mixed precision, or None.
        retain_tokens: Tokens whose graphs vembed's plan keeps on this machine (`retain: auto`).
    """

    device: torch.device
    encoder: Any
    peer: Any
    columns: tuple[Ragged, Ragged]
    autocast: torch.dtype | None
    retain_tokens: int | None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every text."""
        return np.concatenate([column.lengths for column in self.columns])


def build_workload(arguments: argparse.Namespace, lengths: str, *, dropout: float) -> Workload:
    """Build model and batch. The encoder is vembed's own loading of what the peer saved."""
    from sentence_transformers import SentenceTransformer

    from vembed.models.keys import ModelKeys
    from vembed.models.load import load_encoder

    rng = np.random.default_rng(arguments.seed)
    num_pairs = arguments.texts // 2
    columns = tuple(token_ids(num_pairs, lengths, arguments.median, rng) for _ in range(2))
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), arguments, dropout)
        peer = SentenceTransformer(folder, device=arguments.device)
        encoder = load_encoder(ModelKeys(model_name=folder)).to(device)
        # Measured like a step, in a child: the plan's profile runs a backward, after which no child could run one.
        planned = measure(partial(_planned_retention, folder, num_pairs, bf16=arguments.bf16), device).value
    autocast = torch.bfloat16 if arguments.bf16 else None
    if arguments.packing:
        why_not = encoder.why_not_packed(device.type, autocast or torch.float32)
        print(f"padded: {why_not}" if why_not else "rows lie end to end", flush=True)
        if not why_not:
            encoder.pack()
    assert len(columns) == 2
    return Workload(device, encoder.train(), peer.train(), columns, autocast, planned)


def _planned_retention(model: str, num_pairs: int, *, bf16: bool) -> int | None:
    from vembed.config.schema import Config
    from vembed.training.planning import plan_elsewhere

    config = Config(model_name=model, batch_size=num_pairs, bf16=bf16)
    return plan_elsewhere(config, None, shape=None, num_records=num_pairs).chunks.retain_tokens


def token_ids(num_rows: int, lengths: str, median: int, rng: np.random.Generator) -> Ragged:
    """Draw texts as token ids; 5 and above are words."""
    drawn = rng.lognormal(np.log(median), 0.7, num_rows) if lengths == "mixed" else np.full(num_rows, median)
    return Ragged.from_rows([rng.integers(5, VOCABULARY, min(256, max(4, int(length)))) for length in drawn])


def _save_model(folder: Path, arguments: argparse.Namespace, dropout: float) -> None:
    """Write a BERT with random weights as a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    layers, width, heads = SHAPES[arguments.shape]
    torch.manual_seed(arguments.seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=arguments.layers or layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=256,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    backbone = folder / "backbone"
    BertModel(config).save_pretrained(backbone)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    words |= {f"w{index}": index for index in range(5, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=256,
    ).save_pretrained(backbone)
    transformer = modules.Transformer(str(backbone))
    pooling = modules.Pooling(width, pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling, modules.Normalize()]).save(str(folder))


def batch_of(workload: Workload) -> tuple[Pool, BatchStructure]:
    """Return the batch as vembed's engine takes it."""
    encoder = workload.encoder
    features = [Features({"input_ids": column}, column.lengths) for column in workload.columns]
    slots = np.arange(len(workload.lengths))
    pool = Pool(encoder, encoder.collate, Features.concat(features), slots, packs=encoder.packs)
    return pool, structure_of_pairs(len(workload.columns[0].lengths))


def structure_of_pairs(num_pairs: int) -> BatchStructure:
    """Return the structure of a batch of pairs, on the CPU as in a run: as many documents as queries, all different."""
    numbers = np.arange(num_pairs)
    batch = ContrastiveBatch(
        queries=("",) * num_pairs,
        documents=("",) * num_pairs,
        positives_P2=np.stack([numbers, numbers], axis=1),
        query_ids_Q=numbers,
        document_ids_D=num_pairs + numbers,
        record_ids=tuple(range(num_pairs)),
    )
    return BatchStructure.of(batch)
