"""Frozen weights in the type that mixed precision multiplies in: half the memory, and the same numbers.

Autocast rounds the weight of a linear layer to bfloat16 in every call; one that doesn't train is rounded once instead,
and no call holds a copy of it any more. Only linear layers within the lists of transformer layers are: autocast rounds
neither norms nor embeddings, biases are small, and what stands behind the layers may compute in float32. So every
embedding and every gradient stays the same to the last bit.

Only the copy in memory is rounded. What is written is built from the model's files again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from vembed.distributed.shards import keep_asked_dtype

if TYPE_CHECKING:
    from vembed.models.encoder import Encoder


def narrow_frozen(encoder: Encoder, autocast_dtype: torch.dtype | None) -> int:
    """Hold frozen matrices in bfloat16 where mixed precision computes in it; return how many values those are.

    Args:
        encoder: On any device, the meta device included; it is known what of it trains.
        autocast_dtype: Type of mixed precision, None without. With any other type nothing changes.
    """
    if autocast_dtype is not torch.bfloat16 or not encoder.trained.keeps_base:
        return 0
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    count = 0
    for tower in encoder.towers():
        for layer in () if tower.layers is None else encoder.get_submodule(tower.layers).children():
            keep_asked_dtype(layer)
            for module in layer.modules():
                if isinstance(module, nn.Linear | Conv1D) and _is_frozen(module.weight):
                    module.weight.data = module.weight.data.to(autocast_dtype)
                    count += module.weight.numel()
    narrowed_bytes = count * (torch.float32.itemsize - autocast_dtype.itemsize)
    encoder.trained = replace(encoder.trained, narrowed_bytes=narrowed_bytes)
    return count


def _is_frozen(weight: torch.Tensor) -> bool:
    return weight.dtype is torch.float32 and not weight.requires_grad  # autocast leaves float64 alone
