"""From token embeddings to one embedding per row.

The modes are those of sentence-transformers, by its names, so that its folders mean the same here.

Shape legend: R rows, T tokens of a row, or of all rows end to end, S segments: rows and what is behind them, H hidden
dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)


def unit(x: Tensor) -> Tensor:
    """Return vectors of unit length, in at least float32."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def pool(hidden_RTH: Tensor, mask_RT: Tensor, modes: Sequence[PoolingMode]) -> Tensor:
    """Pool the tokens that the mask names; several modes are concatenated.

    Args:
        mask_RT: True for the tokens that count. They may be padded left or right; every row has at least one.

    Returns:
        (R, len(modes) * H), at least float32.
    """
    hidden_RTH = hidden_RTH.to(torch.promote_types(hidden_RTH.dtype, torch.float32))
    return torch.cat([_MODES[mode](hidden_RTH, mask_RT) for mode in modes], dim=-1)


def pool_packed(
    hidden_TH: Tensor, starts_S1: Tensor, first_R: Tensor, place_T: Tensor, modes: Sequence[PoolingMode]
) -> Tensor:
    """Pool rows that lie end to end.

    Args:
        starts_S1: Where segments begin, and the end of the last; the first R are the rows.
        first_R: The first token of each row that counts; all behind it do.
        place_T: Place of each token in its row, counted from 0.

    Returns:
        (R, len(modes) * H), at least float32.
    """
    hidden_TH = hidden_TH.to(torch.promote_types(hidden_TH.dtype, torch.float32))
    num_rows = len(first_R)
    lengths_S, ends_R = starts_S1.diff(), starts_S1[1 : num_rows + 1]
    starts_T1 = F.pad(first_R, (0, len(lengths_S) - num_rows)).repeat_interleave(lengths_S, output_size=len(place_T))
    counts_T1 = (torch.arange(len(place_T), device=place_T.device) >= starts_T1)[:, None]
    counts_R1 = (ends_R - first_R)[:, None].to(hidden_TH.dtype)

    def reduced(x_TH: Tensor, how: str) -> Tensor:
        # One thread adds up a segment in order, so that equal calls give equal bits; lengths are right as they come.
        return torch.segment_reduce(x_TH, how, lengths=lengths_S.long(), unsafe=True)[:num_rows]

    def pooled(mode: PoolingMode) -> Tensor:
        if mode == "cls":
            return hidden_TH[first_R]
        if mode == "lasttoken":
            return hidden_TH[ends_R - 1]
        if mode == "max":
            return reduced(hidden_TH.masked_fill(~counts_T1, -torch.inf), "max")
        if mode == "weightedmean":
            weights_T1 = ((place_T + 1)[:, None] * counts_T1).to(hidden_TH.dtype)
            return reduced(hidden_TH * weights_T1, "sum") / reduced(weights_T1, "sum")
        sums_RH = reduced(hidden_TH * counts_T1, "sum")
        return sums_RH / (counts_R1 if mode == "mean" else counts_R1.sqrt())

    return torch.cat([pooled(mode) for mode in modes], dim=-1)


def _cls(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    """Return the first token that counts."""
    return _at(hidden_RTH, mask_RT.int().argmax(dim=1))


def _last_token(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    """Return the last token that counts, whichever side is padded."""
    positions_T = torch.arange(mask_RT.shape[1], device=mask_RT.device)
    return _at(hidden_RTH, (positions_T * mask_RT).argmax(dim=1))


def _mean(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    return _sum(hidden_RTH, mask_RT) / mask_RT.sum(dim=1, keepdim=True).to(hidden_RTH.dtype)


def _mean_sqrt_length(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    return _sum(hidden_RTH, mask_RT) / mask_RT.sum(dim=1, keepdim=True).to(hidden_RTH.dtype).sqrt()


def _max(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    return hidden_RTH.masked_fill(~mask_RT.unsqueeze(-1), -torch.inf).amax(dim=1)


def _weighted_mean(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    """Weight each token by its position, counted from 1 at the start of the row (SGPT, Muennighoff, 2022)."""
    positions_T = torch.arange(1, mask_RT.shape[1] + 1, device=mask_RT.device, dtype=hidden_RTH.dtype)
    weights_RT = positions_T * mask_RT
    total_R1 = weights_RT.sum(dim=1, keepdim=True)
    return torch.einsum("rth,rt->rh", hidden_RTH, weights_RT) / total_R1


def _sum(hidden_RTH: Tensor, mask_RT: Tensor) -> Tensor:
    return torch.einsum("rth,rt->rh", hidden_RTH, mask_RT.to(hidden_RTH.dtype))


def _at(hidden_RTH: Tensor, positions_R: Tensor) -> Tensor:
    return hidden_RTH[torch.arange(len(hidden_RTH), device=hidden_RTH.device), positions_R]


_MODES: dict[PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_length,
    "weightedmean": _weighted_mean,
    "lasttoken": _last_token,
}
