"""Frozen weights of 4 bits: how they are loaded, and how they become ordinary ones again.

Source: Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vembed.errors import MachineError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig


def four_bit_config() -> BitsAndBytesConfig:
    """Return how transformers loads weights in 4 bits: NormalFloat, its constants quantized too, bfloat16 products.

    Raises:
        MachineError: bitsandbytes or a CUDA device is missing.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MachineError(
            "load_in_4bit needs bitsandbytes, which is missing: pip install 'vembed[qlora]', or set load_in_4bit: false"
        )
    if not torch.cuda.is_available():
        raise MachineError("load_in_4bit needs a CUDA device, and this machine has none: set load_in_4bit: false")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer's weights have 4 bits."""
    return type(layer).__name__ == "Linear4bit"


def weight_dtype(host: nn.Module) -> torch.dtype:
    """Return the type of a model's ordinary weights."""
    return next(each.dtype for each in host.parameters() if each.is_floating_point() and not each.requires_grad)


def plain_layer(layer: Any, dtype: torch.dtype) -> Any:
    """Return a linear layer itself, or where its weights have 4 bits an ordinary one with those they stand for."""
    if not is_quantized(layer):
        return layer
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer)
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return plain.train(layer.training)


def forget_quantization(host: nn.Module) -> None:
    """Replace what has 4 bits by ordinary layers, and let a model's description say no more of it.

    Args:
        host: A model of transformers, or any other, which stays as it is.
    """
    if not getattr(host, "is_quantized", False):
        return
    dtype = weight_dtype(host)
    for name, layer in list(host.named_modules()):
        if is_quantized(layer):
            parent, _, leaf = name.rpartition(".")
            setattr(host.get_submodule(parent), leaf, plain_layer(layer, dtype))
    model: Any = host
    model.is_quantized = False
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
