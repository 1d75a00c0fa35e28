"""How large an encoder is, in the numbers that the plan computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.models.ngram_bag import NgramBag
from vembed.models.text import TextEncoder
from vembed.plan.memory import ModelSize

if TYPE_CHECKING:
    import torch

    from vembed.models.encoder import Encoder


def model_size(encoder: Encoder, *, compute_dtype: torch.dtype) -> ModelSize:
    """Measure an encoder.

    Args:
        encoder: The encoder.
        compute_dtype: What its activations are held in.

    Returns:
        Counted parameters and estimated activations.
    """
    parameters = list(encoder.parameters())
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        bytes_per_value=parameters[0].element_size(),
        dimension=encoder.dimension,
        max_length=encoder.max_length if isinstance(encoder, TextEncoder) else None,
        activation_bytes_per_token=_activation_bytes_per_token(encoder, compute_dtype.itemsize),
    )


def _activation_bytes_per_token(encoder: Encoder, bytes_per_value: int) -> int:
    """Estimate what one token keeps for backward.

    A transformer layer with hidden dim h and a heads keeps 17 h + 2.5 a T values of each token of a row of T tokens
    (dropout masks counted as half a value); the attention's share is that of a kernel that stores its weights.

    Source: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2.
    """
    if isinstance(encoder, NgramBag):
        return 4 * 8 + 2 * bytes_per_value  # indices as int64, a weight and its share
    if not isinstance(encoder, TextEncoder):
        raise TypeError(f"no size formula for {type(encoder).__name__}")
    config = encoder.backbone.config.get_text_config()
    length = encoder.spec.max_length
    values = 17 * config.hidden_size + 2.5 * config.num_attention_heads * length
    return int(config.num_hidden_layers * values * bytes_per_value)
