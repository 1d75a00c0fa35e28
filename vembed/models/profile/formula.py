"""How large an encoder is, in the numbers that the plan computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.models.dual import DualEncoder
from vembed.models.ngram_bag import NgramBag
from vembed.models.open_clip_encoder import OpenClipEncoder
from vembed.models.text import TextEncoder
from vembed.models.tiny_clip import TinyClip
from vembed.models.vision import VisionEncoder
from vembed.plan.memory import CallCost, ModelSize, TowerSize

if TYPE_CHECKING:
    from typing import Any

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
    return ModelSize.by_formula(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        bytes_per_value=parameters[0].element_size(),
        dimension=encoder.dimension,
        max_length=_longest(encoder),
        activation_bytes_per_token=_activation_bytes_per_token(encoder, compute_dtype.itemsize),
    )


def _longest(encoder: Encoder) -> int | None:
    """Return the most tokens of an item, a text or a picture; None where there is no limit."""
    if isinstance(encoder, TextEncoder):
        return encoder.max_length
    if isinstance(encoder, (DualEncoder, OpenClipEncoder, TinyClip)):
        return max(encoder.max_length, encoder.picture_tokens)
    return encoder.picture_tokens if isinstance(encoder, VisionEncoder) else None


def _activation_bytes_per_token(encoder: Encoder, bytes_per_value: int) -> int:
    """Estimate what one token keeps for backward; of two towers, in the one where it keeps more."""
    if isinstance(encoder, NgramBag):
        return 4 * 8 + 2 * bytes_per_value  # indices as int64, a weight and its share
    if isinstance(encoder, TinyClip):
        return encoder.activation_values_per_token * bytes_per_value
    if isinstance(encoder, TextEncoder):
        values = _transformer_values(encoder.backbone.config.get_text_config(), encoder.spec.max_length)
    elif isinstance(encoder, VisionEncoder):
        values = _transformer_values(encoder.backbone.config, encoder.picture_tokens)
    elif isinstance(encoder, DualEncoder):
        config = encoder.model.config
        values = max(
            _transformer_values(config.text_config, encoder.max_length),
            _transformer_values(config.vision_config, encoder.picture_tokens),
        )
    elif isinstance(encoder, OpenClipEncoder):
        values = max(_layer_values(*tower) for tower in encoder.tower_shapes())
    else:
        raise TypeError(f"no size formula for {type(encoder).__name__}")
    return int(values * bytes_per_value)


def _transformer_values(config: Any, length: int) -> float:
    return _layer_values(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, length)


def _layer_values(num_layers: int, hidden: int, num_heads: int, length: int) -> float:
    """Return the values that a token keeps in all layers of a transformer.

    A layer with hidden dim h and a heads keeps 17 h + 2.5 a T values of each token of a row of T tokens (dropout masks
    counted as half a value); the attention's share is that of a kernel that stores its weights.

    Source: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2.
    """
    return num_layers * (17 * hidden + 2.5 * num_heads * length)


PICTURE_STACK = "backbone.visual"
"""Where a language model that also reads pictures keeps the stack that they pass through first."""


def picture_stack(encoder: Encoder, bytes_per_value: int) -> TowerSize | None:
    """Return the size of the picture stack of a language model, None where it has none.

    It cuts pictures into patches by values that fake tensors don't have, so that its activations are estimated, as
    those of an attention that doesn't store its weights.

    Args:
        encoder: The encoder, on the meta device if need be.
        bytes_per_value: Of its activations.

    Source: Korthikanti et al., 2022, equation 2 without the attention's weights.
    """
    stack = getattr(getattr(encoder, "backbone", None), "visual", None)
    if stack is None:
        return None
    config, parameters = stack.config, list(stack.parameters())
    layers, hidden = int(config.depth), int(config.hidden_size)
    block = max(sum(each.numel() for each in layer.parameters()) for layer in stack.blocks)
    layer_bytes, boundary_bytes = 17.0 * hidden * bytes_per_value, 1.0 * hidden * bytes_per_value
    count = sum(each.numel() for each in parameters)
    trainable = [each.numel() for each in parameters if each.requires_grad]
    return TowerSize(
        name="vision",
        max_tokens=int(config.num_position_embeddings),
        num_parameters=count,
        num_trainable=sum(trainable),
        largest_block=block,
        saved=CallCost(layers * layer_bytes),
        transient=CallCost(4 * boundary_bytes),
        saved_checkpointed=CallCost(layers * boundary_bytes),
        transient_checkpointed=CallCost(layer_bytes + 4 * boundary_bytes),
        forward_flops=CallCost(2.0 * count, 4.0 * hidden * layers),
        items="pictures",
        largest_tensor=max(trainable, default=0),
    )
