"""The text encoder: a Hugging Face transformer, pooling, optional dense layers, normalisation.

Rows of a chunk are always padded at the right, whatever side the tokenizer pads: bidirectional attention masks the
padding, causal attention never sees it, and absolute positions start at the first real token. A chunk whose rows are
all equally long carries no mask at all.

Shape legend: R rows, T tokens, H hidden dim, E embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.models.encoder import Encoder
from vembed.models.pooling import pool
from vembed.models.towers import find_tower

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Item, Side
    from vembed.models.encoder import Similarity
    from vembed.models.pooling import PoolingMode
    from vembed.models.towers import Tower


@dataclass(frozen=True, slots=True)
class TextSpec:
    """How texts go through a transformer.

    Attributes:
        pooling: One mode or several, concatenated.
        max_length: Longest input in tokens, special tokens included.
        prompts: Text put before each side's items.
        include_prompt: Whether the tokens of the prompt are pooled too.
        normalize: Whether embeddings have unit length.
        lower_case: Whether texts are lower-cased before the tokenizer.
        origin: Where each of these was read, for the plan: decision -> source.
    """

    pooling: tuple[PoolingMode, ...]
    max_length: int
    prompts: Mapping[Side, str] = field(default_factory=lambda: {"query": "", "document": ""})
    include_prompt: bool = True
    normalize: bool = True
    lower_case: bool = False
    origin: Mapping[str, str] = field(default_factory=dict)


def count_truncated(encoded: BatchEncoding, lengths: NDArray[np.int64], max_length: int) -> int:
    """Return how many texts a tokenizer cut.

    Args:
        encoded: What it made of n texts, without padding.
        lengths: Tokens of each text, (n,).
        max_length: Where it cut.
    """
    if encoded.encodings is not None:
        return sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    # A tokenizer in Python doesn't say what it cut: texts of just the full length count too.
    return int((lengths == max_length).sum())


class Dense(nn.Module):
    """A linear layer with an activation behind the pooling, as sentence-transformers' folders describe it.

    Args:
        in_features: Dim of the pooled embedding.
        out_features: Dim of the result.
        bias: Whether the layer has a bias.
        activation: A parameter-free activation; its class name is what gets written on export.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return activation(W x + b) in the type of x, which may be wider than that of the weights."""
        bias = None if self.linear.bias is None else self.linear.bias.to(x.dtype)
        result: Tensor = self.activation(F.linear(x, self.linear.weight.to(x.dtype), bias))
        return result


class TextEncoder(Encoder):
    """A transformer for texts.

    Args:
        name: What it was loaded by.
        backbone: The transformer, returning `last_hidden_state`.
        tokenizer: Its tokenizer; it must have a pad token.
        spec: Pooling, length, prompts.
        dense: Layers behind the pooling.
    """

    def __init__(
        self,
        name: str,
        *,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        spec: TextSpec,
        dense: Sequence[Dense] = (),
    ) -> None:
        super().__init__()
        self.name = name
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.spec = spec
        self.dense = nn.ModuleList(dense)
        self.max_length = spec.max_length
        hidden = int(backbone.config.get_text_config().hidden_size)
        self.dimension = dense[-1].linear.out_features if dense else hidden * len(spec.pooling)
        pad_id = tokenizer.pad_token_id
        assert isinstance(pad_id, int)
        self._pad_id = pad_id
        self._prompt_lengths: dict[str, int] = {}

    @property
    def similarity(self) -> Similarity:
        """The dot product where nothing normalises, else the cosine."""
        return "cosine" if self.spec.normalize else "dot"

    @property
    def prompts(self) -> dict[Side, str]:
        """Text that is put before each side's items."""
        return dict(self.spec.prompts)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Tokenize texts behind their side's prompt; cut and count those over `max_length`."""
        prompt = self.spec.prompts[side]
        texts = [prompt + text.strip() for text in texts_of(items)]
        if self.spec.lower_case:
            texts = [text.lower() for text in texts]
        encoded = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.max_length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        # A tokenizer without special tokens makes nothing of an empty text; a row needs one token to pool.
        ids = Ragged.from_rows([row or [self._pad_id] for row in encoded["input_ids"]])
        num_truncated = count_truncated(encoded, ids.lengths, self.spec.max_length)
        per_row: dict[str, NDArray[np.int64]] = {}
        if not self.spec.include_prompt:
            per_row["prompt_lengths"] = np.full(len(items), self._prompt_length(prompt), dtype=np.int64)
        return Features({"input_ids": ids}, ids.lengths, per_row, num_truncated)

    def _prompt_length(self, prompt: str) -> int:
        """Count a prompt's tokens, with special tokens at its start but not at its end."""
        if not prompt:
            return 0
        if prompt not in self._prompt_lengths:
            ids = self.tokenizer(prompt.lower() if self.spec.lower_case else prompt)["input_ids"]
            assert isinstance(ids, list)
            ends_special = ids[-1] in self.tokenizer.all_special_ids
            self._prompt_lengths[prompt] = len(ids) - int(ends_special)
        return self._prompt_lengths[prompt]

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pad at the right, never past `max_length`; the mask is left out when nothing is padded."""
        width = min(width, self.spec.max_length)  # a width rounded up could pass the last position embedding
        ids = features.columns["input_ids"].take(rows)
        inputs = {"input_ids": torch.from_numpy(ids.padded(width, self._pad_id)).long()}
        if (ids.lengths < width).any():
            mask_RT = np.arange(width) < ids.lengths[:, None]
            inputs["attention_mask"] = torch.from_numpy(mask_RT).long()
        if "prompt_lengths" in features.per_row:
            inputs["prompt_lengths"] = torch.from_numpy(features.per_row["prompt_lengths"][rows])
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E); everything behind the transformer runs in at least float32."""
        ids_RT = inputs["input_ids"]
        mask_RT = inputs.get("attention_mask")
        hidden_RTH = self.backbone(input_ids=ids_RT, attention_mask=mask_RT).last_hidden_state
        with torch.autocast(hidden_RTH.device.type, enabled=False):
            x = pool(hidden_RTH, self._pooled_tokens(inputs), self.spec.pooling)
            for layer in self.dense:
                x = layer(x)
            return F.normalize(x, dim=-1) if self.spec.normalize else x

    def _pooled_tokens(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return which tokens are pooled, bool (R, T). A text that its prompt fills up is pooled over all of it."""
        ids_RT = inputs["input_ids"]
        mask_RT = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(ids_RT).bool()
        if "prompt_lengths" not in inputs:
            return mask_RT
        positions_T = torch.arange(ids_RT.shape[1], device=ids_RT.device)
        beyond_RT = mask_RT & (positions_T >= inputs["prompt_lengths"][:, None])
        return torch.where(beyond_RT.any(dim=1, keepdim=True), beyond_RT, mask_RT)

    def save(self, folder: Path) -> None:
        """Write a folder that sentence-transformers, transformers and vembed load."""
        from vembed.models.sentence_transformers_format import write_sentence_transformers

        write_sentence_transformers(self, folder)

    def describe(self) -> dict[str, str]:
        """Return pooling, length, prompts and where they were read."""
        facts = {
            "pooling": " + ".join(self.spec.pooling),
            "max_seq_length": str(self.max_length),
            "query_prompt": repr(self.spec.prompts["query"]),
            "document_prompt": repr(self.spec.prompts["document"]),
            "similarity": "cosine" if self.spec.normalize else "dot product",
            "attention": str(self.backbone.config._attn_implementation),
        }
        return {
            key: f"{value} ({self.spec.origin[key]})" if key in self.spec.origin else value
            for key, value in facts.items()
        } | self.training_facts()

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower; dense layers behind the pooling are its projection."""
        depth = getattr(self.backbone.config.get_text_config(), "num_hidden_layers", None)
        return (find_tower(self, "text", parts=("backbone", "dense"), projection=("dense",), depth=depth),)

    def adapter_host(self) -> nn.Module:
        """Return the transformer."""
        return self.backbone

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in backward; non-reentrant, which is exact with dropout and with gradient caching."""
        if not self.backbone.supports_gradient_checkpointing:
            super().enable_gradient_checkpointing()
        self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
