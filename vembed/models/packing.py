"""Rows of an encoder call laid end to end, so that no token is padding.

Positions begin anew in each row, attention stays within it (`vembed.models.attention`), and pooling goes by rows. What
fills a call up to a round number of tokens is a row of its own, of padding, that nothing pools.

Shape legend: R rows, S segments: the rows, and the filling where there is one; T tokens of all segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from vembed.batch import Ragged

PACKED_TYPES = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "ernie"),
        *("modernbert", "eurobert", "nomic_bert", "gte", "jina_embeddings_v3"),
        *("qwen2", "qwen3", "llama", "mistral", "gemma3_text"),
    }
)
"""Types of transformers whose vectors and gradients are proven to be those of padded rows (tests/models/test_packing.py
proves each): their tokens meet in attention alone, and they take positions from outside."""

_LONGEST_MULTIPLE = 128
"""The longest row of a call is rounded up to it, as operators count in such blocks: few numbers to compile for."""


def why_not_packed(config: PreTrainedConfig) -> str:
    """Say why rows of a transformer can't lie end to end, whatever the device; empty where they can."""
    if hasattr(config, "relative_attention_max_distance"):
        return f"{config.model_type} models add a bias for each distance, which operators for packed rows don't take"
    if config.model_type not in PACKED_TYPES:
        return f"packing isn't tested for {config.model_type} models"
    return ""


def pack(ids: Ragged, width: int, fill: int) -> dict[str, Tensor]:
    """Lay rows of token ids end to end.

    Args:
        ids: R rows.
        width: Tokens of the call; no fewer than the rows have are taken.
        fill: Token of the filling.

    Returns:
        "input_ids" (1, T); "lengths" of the segments, (S,); and "rows", which holds nothing: its shape, (0, R, at least
        the longest segment), says on a device what would have to be read back.
    """
    lengths = ids.lengths
    used = int(lengths.sum())
    row = np.full((1, max(width, used)), fill, dtype=ids.values.dtype)
    row[0, :used] = ids.values
    segments = lengths if used == row.size else np.append(lengths, row.size - used)
    longest = -(-int(segments.max()) // _LONGEST_MULTIPLE) * _LONGEST_MULTIPLE
    return {
        "input_ids": torch.from_numpy(row),
        "lengths": torch.from_numpy(segments.astype(np.int32)),
        "rows": torch.empty(0, len(lengths), longest, dtype=torch.int32),
    }


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where rows lie, on their device."""

    starts_S1: Tensor  # where segments begin, and the end of the last, int32
    segment_T: Tensor  # which segment a token is of
    position_T: Tensor  # of a token in its row, counted from 0; 0 throughout the filling
    num_rows: int  # R
    longest: int  # at least the tokens of the longest segment

    @classmethod
    def of(cls, inputs: dict[str, Tensor]) -> PackedRows:
        """Read what `pack` made, without waiting for the device."""
        lengths_S, (num_rows, longest) = inputs["lengths"], inputs["rows"].shape[1:]
        device, num_tokens = lengths_S.device, inputs["input_ids"].shape[1]
        starts_S1 = F.pad(lengths_S.cumsum(0), (1, 0)).int()
        segments_S = torch.arange(len(lengths_S), device=device)
        segment_T = segments_S.repeat_interleave(lengths_S, output_size=num_tokens)
        position_T = torch.arange(num_tokens, device=device) - starts_S1[segment_T]
        return cls(starts_S1, segment_T, position_T.masked_fill(segment_T >= num_rows, 0), num_rows, longest)

    def positions(self, ids_1T: Tensor, padding_id: int | None) -> Tensor:
        """Return the position of each token, (1, T).

        Args:
            ids_1T: The tokens.
            padding_id: Of a model whose positions begin behind that of its padding; None: they begin at 0.
        """
        if padding_id is None:
            return self.position_T[None]
        counts_T = (ids_1T[0] != padding_id).long()
        passed_T = counts_T.cumsum(0)
        before_S = F.pad(passed_T, (1, 0))[self.starts_S1[:-1]]
        return (((passed_T - before_S[self.segment_T]) * counts_T) + padding_id)[None]

    def first_pooled(self, prompt_lengths_R: Tensor | None) -> Tensor:
        """Return the first token of each row that is pooled: behind its prompt, unless that fills it."""
        first_R = self.starts_S1[: self.num_rows].long()
        if prompt_lengths_R is None:
            return first_R
        lengths_R = self.starts_S1.diff()[: self.num_rows]
        return first_R + torch.where(prompt_lengths_R < lengths_R, prompt_lengths_R, 0)
