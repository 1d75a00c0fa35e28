"""Attention for rows that are padded at the right, and for rows that lie end to end.

transformers makes masks for any padding, and looks into them for what can be left out: each look waits for the device.
Here padding stands at the right, always, so that nothing needs a look:

1. Causal attention takes no mask: padding stands behind every token that counts, and none of them sees it.
2. Other attention takes a number for each token that is added to its scores, (R, 1, 1, T), made on the device.
3. Where padding gives vectors too, as the tokens that fill queries up, causal attention takes a mask: each of them
   would see those before it.
4. Packed rows lie end to end, so that no token is padding: positions begin anew in each row, attention stays within
   it, and pooling goes by rows. Attention takes their cumulative lengths and an operator for them; on a CPU a mask of
   blocks is the reference. What fills a call up to a round number of tokens is a row of its own, which nothing pools.

Shape legend: R rows; T tokens of a padded row, or of all rows end to end; S segments of these: the rows, and the
filling where there is one; H heads, D their dim.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vembed.text import first_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from vembed.batch import Ragged

NAME = "vembed"
"""Name of these functions among the attention functions of transformers."""

FILLED = "vembed_filled"
"""Name where the positions that are masked at the right are read as well."""

PICTURES = "vembed_flash"
"""Name of `attend_to_pictures`: by the word "flash" models pass the lengths of pictures instead of splitting them."""

_OWN_ATTENTION = frozenset({"mpnet"})
"""Types of models whose layers call no attention function, but take the masks of one."""

HALF = (torch.float16, torch.bfloat16)

_LARGEST_HEAD = 256
"""Of flash attention; it is a multiple of 8 too."""
_LEAST_CAPABILITY = (8, 0)
"""Of the devices that flash attention runs on."""

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


def spare_masks(backbone: PreTrainedModel, *, reads_padding: bool = False) -> None:
    """Let a transformer that uses torch's attention take it without looks into its masks.

    Args:
        reads_padding: Whether tokens that no other sees are read: causal attention then needs its mask.
    """
    config = backbone.config.get_text_config()
    if config._attn_implementation == "sdpa" or config.model_type in _OWN_ATTENTION:
        config._attn_implementation = FILLED if reads_padding else NAME


def spare_splits(visual: PreTrainedModel) -> None:
    """Let a network for pictures that lie end to end take torch's attention without reading their lengths back."""
    if visual.config._attn_implementation == "sdpa":
        visual.config._attn_implementation = PICTURES


def attention_name(backbone: PreTrainedModel) -> str:
    """Return the attention that a transformer uses, by the name that a user gives it."""
    config = backbone.config.get_text_config()
    if config._attn_implementation not in (NAME, FILLED):
        return str(config._attn_implementation)
    return "eager" if config.model_type in _OWN_ATTENTION else "sdpa"


def compute_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type that attention computes in: that of mixed precision where it is on, else the weights' own."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


# --- Padded rows ------------------------------------------------------------------------------------------------------


def right_padding_mask(
    *,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> Tensor | None:
    """Return the mask of rows that are padded at the right, in the form that `transformers.masking_utils` asks for it.

    Args:
        kv_length: T.
        attention_mask: True for tokens, (R, T); None where none is padding.
        local_size: Tokens that see each other where attention is local.
        allow_is_causal_skip: Whether attention is causal, or causal and local, and no more.
        allow_is_bidirectional_skip: Whether a token sees all others, or all that are near, and no more.
        dtype: Of the embeddings.
        others: What the general mask is made of.
    """
    if allow_is_causal_skip:
        attention_mask = None  # no token that counts sees the padding behind it
    sees_all = local_size is None or kv_length < local_size
    if sees_all and (allow_is_causal_skip or allow_is_bidirectional_skip):
        if attention_mask is None:
            return None
        # One number for each token, broadcast over heads and queries: R * T values instead of R * T * T, in the type of
        # the scores, as torch's operators want it.
        dtype = compute_dtype(attention_mask.device.type, dtype)
        hidden_RT = torch.zeros_like(attention_mask, dtype=dtype).masked_fill(~attention_mask, -torch.inf)
        return hidden_RT[:, None, None, :]
    # A window, or a rule of the model's own: the general mask, made without the looks (both skips are off).
    return sdpa_mask(
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        dtype=dtype,
        **others,
    )


def _filled_mask(*, allow_is_causal_skip: bool = True, **others: Any) -> Tensor | None:  # noqa: ARG001
    """Return the same mask, whether or not attention is causal."""
    return right_padding_mask(allow_is_causal_skip=False, **others)


# --- Rows end to end --------------------------------------------------------------------------------------------------


def why_not_packed(backbone: PreTrainedModel, device_type: str, dtype: torch.dtype) -> str:
    """Return why a transformer can't take packed rows on a device, "" where it can.

    Args:
        device_type: "cpu", or that of an accelerator.
        dtype: Type that attention computes in.
    """
    config = backbone.config.get_text_config()
    if hasattr(config, "relative_attention_max_distance"):
        return f"{config.model_type} models add a bias for each distance, which operators for packed rows don't take"
    if config.model_type not in PACKED_TYPES:
        return f"packing isn't tested for {config.model_type} models"
    if attention_name(backbone) == "eager":
        return "attn_implementation eager doesn't support it"
    if device_type == "cpu":
        return ""
    if device_type != "cuda":
        return f"no operator for it is known on {device_type}"
    if dtype not in HALF:
        return f"its operators need half precision, and the run computes in {str(dtype).removeprefix('torch.')}"
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head > _LARGEST_HEAD or head % 8:
        return f"its operators take no attention heads of {head} dims"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return "its operators need a GPU of capability 8.0 or more"
    dropout, obstacle = attention_dropout(backbone), why_no_flash_attn()
    if dropout and obstacle:
        return (
            f"the model drops {dropout:g} of its attention weights, which torch's operator can't; flash-attn can, and "
            f"it {obstacle}"
        )
    return ""


def attention_dropout(backbone: PreTrainedModel) -> float:
    """Return the share of attention weights that a model drops in training."""
    config = backbone.config.get_text_config()
    return max(float(getattr(config, key, 0.0) or 0.0) for key in ("attention_probs_dropout_prob", "attention_dropout"))


@functools.cache
def why_no_flash_attn() -> str:
    """Return why the package flash-attn can't be used, "" where it can. It can drop attention weights, torch's can't.

    It is built for one version of torch: under another one it is installed and doesn't import.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore] # noqa: F401
    except ModuleNotFoundError as error:
        return "isn't installed" if error.name == "flash_attn" else f"doesn't import ({first_line(error)})"
    except (ImportError, OSError, RuntimeError) as error:
        return f"doesn't import ({first_line(error)})"
    return ""


def pack_rows(ids: Ragged, width: int, fill: int) -> dict[str, Tensor]:
    """Lay rows of token ids end to end.

    Args:
        ids: R rows.
        width: Tokens of the call; no fewer than the rows have are taken.
        fill: Token of the filling.

    Returns:
        "input_ids" (1, T); "lengths" of the segments, (S,); and "packed_sizes", which holds nothing: its shape, (0, R,
        at least the longest segment), tells the host two numbers that it would have to read back from the device.
    """
    lengths = ids.lengths
    used = int(lengths.sum())
    # `Ragged` holds rows end to end already: one copy, and no loop over them.
    row = np.full((1, max(width, used)), fill, dtype=ids.values.dtype)
    row[0, :used] = ids.values
    segments = lengths if used == row.size else np.append(lengths, row.size - used)
    longest = -(-int(segments.max()) // _LONGEST_MULTIPLE) * _LONGEST_MULTIPLE
    return {
        "input_ids": torch.from_numpy(row),
        "lengths": torch.from_numpy(segments.astype(np.int32)),
        "packed_sizes": torch.empty(0, len(lengths), longest, dtype=torch.int32),
    }


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Bounds, segments and positions of rows that lie end to end, on their device."""

    starts_S1: Tensor  # where segments begin, and the end of the last, int32
    segment_T: Tensor  # which segment a token is of
    position_T: Tensor  # of a token in its row, counted from 0; 0 throughout the filling
    num_rows: int  # R
    longest: int  # at least the tokens of the longest segment

    @classmethod
    def of(cls, inputs: dict[str, Tensor]) -> PackedRows:
        """Read what `pack_rows` made, without waiting for the device."""
        lengths_S, (num_rows, longest) = inputs["lengths"], inputs["packed_sizes"].shape[1:]
        device, num_tokens = lengths_S.device, inputs["input_ids"].shape[1]
        # Everything below is arithmetic on the device. Counts that Python needs come from shapes, which the host knows.
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
        # As RoBERTa counts them: tokens equal to the padding don't move the position. The count runs over all rows, and
        # what stood before a row is taken away again.
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


def packed_mask(backbone: PreTrainedModel, segment_T: Tensor) -> Tensor:
    """Return the mask that a transformer is given with packed rows: which tokens share one, bool (1, 1, T, T).

    Where an operator knows their lengths it is a mask of one token, which only keeps transformers from making another.
    """
    device_type = segment_T.device.type
    if device_type != "cpu" and not why_not_packed(backbone, device_type, compute_dtype(device_type, backbone.dtype)):
        segment_T = segment_T[:1]
    return (segment_T[:, None] == segment_T[None, :])[None, None]


# --- Attention functions of transformers ------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in a layer of transformers.

    Args:
        module: The layer.
        query: (R, H, T, D).
        key: (R, fewer or equal H, T, D).
        value: The same.
        attention_mask: Of padded rows; of packed ones without an operator for them, which tokens share a row,
            (1, 1, T, T).
        dropout: Share of the weights that is dropped.
        scaling: Of the scores.
        is_causal: Whether a token sees none behind it; None is as the layer says.
        sliding_window: Tokens at less than this distance see each other; None is all.
        cu_seq_lens_q: Where packed rows begin, and their end, int32, (S + 1,); None: rows are padded.
        max_length_q: At least the tokens of the longest packed row.
        others: For torch's attention.

    Returns:
        (R, T, H, D).
    """
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    # A decoder's window counts the token itself; made bidirectional, transformers counts as many on each side of it.
    is_widened = is_causal is False and getattr(module, "is_causal", True)
    reach = -1 if sliding_window is None else sliding_window - (not is_widened)
    if attention_mask is not None and attention_mask.shape[-1] == query.shape[2]:
        # The reference, O(T * T) in memory: the blocks of the rows, cut by direction and window.
        mask = attention_mask
        if causal or reach >= 0:
            positions_T = torch.arange(query.shape[2], device=query.device)
            back_TT = positions_T[:, None] - positions_T[None, :]  # tokens from the one that looks back to the one seen
            mask = mask & (back_TT >= 0) if causal else mask
            mask = mask & (back_TT.abs() <= reach) if reach >= 0 else mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
        )
    # Autocast doesn't know these operators, which refuse the float32 that rotary positions may have made.
    dtype = compute_dtype(query.device.type, query.dtype)
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    assert max_length_q is not None
    operator = _varlen_attn if why_no_flash_attn() else _flash_attn
    out_THD = operator(
        query_THD,
        key_THD,
        value_THD,
        cu_seq_lens_q,
        max_length_q,
        dropout=dropout,
        scaling=scaling,
        window=(reach, 0 if causal else reach),
    )
    return out_THD.unsqueeze(0), None


def attend_to_pictures(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in a layer for pictures that lie end to end, each to itself alone.

    Args:
        module: The layer.
        query: (1, H, T, D), and so are key and value.
        key: See query.
        value: See query.
        attention_mask: None.
        cu_seq_lens_q: Where pictures begin, and their end, int32, (S + 1,).
        max_length_q: Patches of the largest.
        dropout: Share of the weights that is dropped.
        scaling: Of the scores.
        others: Not needed here.

    Returns:
        (1, T, H, D).
    """
    del others, attention_mask

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, _ = sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=False
        )
        return out

    num_pictures = len(cu_seq_lens_q) - 1
    if num_pictures * max_length_q == query.shape[2]:  # all of one size: a rectangle, known without their lengths
        size = (num_pictures, max_length_q)
        out = alone(*(states[0].unflatten(1, size).transpose(0, 1) for states in (query, key, value)))
        return out.flatten(0, 1).unsqueeze(0), None
    if query.device.type == "cuda" and compute_dtype("cuda", query.dtype) in HALF:
        lengths: dict[str, Any] = {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
        return attend(module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=False, **lengths)
    # On a CPU, or in full precision: picture by picture. Reading the lengths waits for the device, once per layer.
    lengths_S = cu_seq_lens_q.diff().tolist()
    splits = (states.split(lengths_S, dim=2) for states in (query, key, value))
    return torch.cat([alone(*picture) for picture in zip(*splits, strict=True)], dim=1), None


def _flash_attn(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    starts_S1: Tensor,
    longest: int,
    *,
    dropout: float,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Attend by the package flash-attn."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    out_THD: Tensor = flash_attn_varlen_func(
        query_THD,
        key_THD,
        value_THD,
        starts_S1,
        starts_S1,
        longest,
        longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=window[1] == 0,
        window_size=window,
        # Its backward pass adds up with atomics otherwise, in another order each time.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out_THD


def _varlen_attn(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    starts_S1: Tensor,
    longest: int,
    *,
    dropout: float,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Attend by torch's own operator, which drops no weights."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(f"torch's operator for packed rows has no attention dropout, but {dropout} was asked for")
    # Fewer heads of keys than of queries: each serves a group. The operator of torch 2.11 wants as many of both.
    groups = query_THD.shape[1] // key_THD.shape[1]
    others: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        others["enable_gqa"] = True
    elif groups > 1:
        key_THD, value_THD = (states.repeat_interleave(groups, dim=1) for states in (key_THD, value_THD))
    out_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        starts_S1,
        starts_S1,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        **others,
    )
    assert isinstance(out_THD, torch.Tensor)
    return out_THD


AttentionInterface.register(NAME, attend)
AttentionInterface.register(FILLED, attend)
AttentionInterface.register(PICTURES, attend_to_pictures)
AttentionMaskInterface.register(NAME, right_padding_mask)
AttentionMaskInterface.register(FILLED, _filled_mask)
