"""Hash weights: what tells one model from another, whatever file it was read from."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]], *, sampled_values: int | None = None) -> str:
    """Return the SHA-256 (hex) over name, type, shape and bytes of tensors, the same on every device.

    Args:
        tensors: Name and tensor, in an order that means the same every time.
        sampled_values: Hash an even sample of about so many values of each tensor instead of all of them.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().reshape(-1)
        if sampled_values is not None:
            values = values[:: max(1, values.numel() // sampled_values)]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
