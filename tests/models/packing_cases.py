"""Tiny text encoders of every type whose rows can lie end to end, built from configs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.losses.base import BatchStructure
from vembed.models.formats import TextSpec
from vembed.models.hub import prepare_backbone
from vembed.models.text import TextEncoder
from vembed.models.text_spec import family_of, made_bidirectional

POSITIONS, PAD = 64, 1
LENGTHS = (5, 17, 1, 9, 30, 9)
"""Tokens of the rows; the longest is beyond every window below."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS + 2,
    "pad_token_id": PAD,
    "initializer_range": 0.3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GROUPED = {"num_key_value_heads": 1, "head_dim": 16}
_LOCAL = {"layer_types": ["full_attention", "sliding_attention"]}

SHAPES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie")},
    "distilbert": {"dim": 32, "n_heads": 2, "n_layers": 2, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
    "modernbert": {**_LOCAL, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3},
    "eurobert": _GROUPED,
    "nomic_bert": {},
    "gte": {},
    "jina_embeddings_v3": {},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, **_LOCAL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 6},
    "gemma3_text": {**_GROUPED, **_LOCAL, "sliding_window": 7},
}

OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "mpnet": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    "gemma2": {**_GROUPED, "attn_logit_softcapping": 0.5},
    "granite": {"num_key_value_heads": 1},
    "olmo2": {"num_key_value_heads": 1},
    "phi3": {"num_key_value_heads": 1, "eos_token_id": 2},
    "smollm3": {"num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 2},
}
"""Types that are padded."""


def build(kind: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> TextEncoder:
    """Build an encoder without dropout.

    Args:
        kind: A key of SHAPES or OTHER_SHAPES.
        dtype: Of its weights.
        changes: Of the config, or of the spec where they are fields of it; or `bidirectional`.
    """
    both_ways = changes.pop("bidirectional", False)
    spec = {key: changes.pop(key) for key in ("pooling", "include_prompt", "normalize", "max_length") if key in changes}
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SHAPE, **(SHAPES | OTHER_SHAPES)[kind], **changes})
    config = made_bidirectional(kind, config) if both_ways else config
    backbone = family_of(config).auto_class.from_config(config, dtype=dtype)
    prepare_backbone(backbone)
    for module in backbone.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():  # rotary frequencies
                setattr(module, name, buffer.to(dtype))
    _norms_in_own_type(backbone, dtype)
    tokenizer: Any = SimpleNamespace(pad_token_id=PAD)
    decided = TextSpec(**{"pooling": ("mean",), "max_length": POSITIONS, **spec})
    return TextEncoder(kind, backbone=backbone, tokenizer=tokenizer, spec=decided).eval()


def _norms_in_own_type(backbone: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replace norms that compute in float32 whatever their type, which would hide all differences below 1e-7."""
    for name, module in list(backbone.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            (weight,) = module.parameters()
            backbone.set_submodule(name, torch.nn.RMSNorm(weight.shape, eps=1e-6, dtype=dtype))


def rows(lengths: tuple[int, ...] = LENGTHS, *, prompts: tuple[int, ...] | None = None) -> Features:
    """Return rows of random tokens, a few of them padding where no padding is."""
    random = np.random.default_rng(0)
    ids = Ragged.from_rows([random.integers(0, 60, length) for length in lengths])
    per_row = {} if prompts is None else {"prompt_lengths": np.array(prompts)}
    return Features({"input_ids": ids}, ids.lengths, per_row)


def encode(encoder: TextEncoder, features: Features, *, packed: bool, width: int | None = None) -> torch.Tensor:
    """Encode all rows in one call, padded or end to end."""
    if packed and not encoder.packs:
        encoder.pack()
    encoder.packs = packed
    return encoder(encoder.collate(features, np.arange(len(features)), width or int(features.lengths.max())))


def with_gradients(z_RE: torch.Tensor, encoder: TextEncoder) -> dict[str, torch.Tensor]:
    """Return vectors and the gradients of a fixed weighting of them, by parameter."""
    encoder.zero_grad()
    u_RE = torch.from_numpy(np.random.default_rng(1).standard_normal(tuple(z_RE.shape))).to(z_RE.dtype)
    torch.autograd.backward(z_RE, u_RE)
    grads = {name: each.grad.clone() for name, each in encoder.named_parameters() if each.grad is not None}
    return {"vectors": z_RE.detach(), **grads}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference in units of the largest number of each tensor, but of 1e-3 at least."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1e-3)) for name in one)


class Reads(TorchDispatchMode):
    """Counts numbers that are read from the device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


PAIRS = 9


def batch() -> tuple[Features, BatchStructure]:
    """Nine queries with a document each, of 1 to 40 tokens."""
    random = np.random.default_rng(2)
    ids = Ragged.from_rows([random.integers(PAD + 1, 60, 1 + 7 * row % 40) for row in range(2 * PAIRS)])
    numbers = np.arange(PAIRS, dtype=np.int64)
    pairs = ContrastiveBatch(
        queries=("",) * PAIRS,
        documents=("",) * PAIRS,
        positives_P2=np.stack([numbers, numbers], axis=1),
        query_ids_Q=numbers,
        document_ids_D=numbers + 100,
        record_ids=tuple(range(PAIRS)),
    )
    return Features({"input_ids": ids}, ids.lengths), BatchStructure.of(pairs)
