"""Models, batches and engines of the proof. Weights are random; on a CPU a layer or two of the same families."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from engine_workload import Workload
    from proof_rows import Setting
    from torch import Tensor

    from vembed.gradcache.engine import GradCacheEngine
    from vembed.models.encoder import Encoder
    from vembed.models.text import TextEncoder

SHAPES = Path(__file__).resolve().parents[1] / "configs" / "shapes"


def shape_of(family: str, setting: Setting) -> dict[str, Any]:
    """Return the config of a model of a family."""
    import memory_cases as small

    if setting.is_small:
        modern = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        return {
            "bert": small.bert(64, 2, 256),
            "qwen3": small.qwen(128, 2, 256),
            "clip": small.clip(64, 64, 1),
            "modernbert": {"model_type": "modernbert", **modern},
        }[family]
    if family == "modernbert":
        return {"model_type": "modernbert"}  # its defaults are those of the base model
    file = {"bert": "bert_base", "qwen3": "qwen3_0_6b", "clip": "clip_vit_base_patch32", "8B": "qwen3_8b"}[family]
    content: dict[str, Any] = json.loads((SHAPES / f"{file}.json").read_text("utf-8"))
    return content


def encoder_of(shape: dict[str, Any], setting: Setting, dtype: str = "float32") -> Encoder:
    """Return a model with random weights on the device, in training.

    Encoders of texts are put together here, as the configuration of a run needs pydantic, and a CLIP needs Pillow.
    """
    if "vision_config" in shape:
        from vembed.models.keys import ModelKeys
        from vembed.models.load import load_skeleton

        path = setting.folder / "shape.json"
        path.write_text(json.dumps(shape), "utf-8")
        keys = ModelKeys.model_validate({"model_name": str(path), "torch_dtype": dtype})
        return load_skeleton(keys, device=setting.device).train()
    return text_encoder(shape, setting.device, dtype).train()


def text_encoder(shape: dict[str, Any], device: str, dtype: str = "float32", tokenizer: Any = None) -> TextEncoder:
    """Return a transformer for texts with random weights.

    Args:
        tokenizer: None where all texts are token ids already.
    """
    import torch
    from transformers import AutoConfig, PreTrainedModel

    from vembed.models.formats import TextSpec
    from vembed.models.hub import DTYPES, prepare_backbone, tokenizer_facts
    from vembed.models.text import TextEncoder
    from vembed.models.text_spec import family_of, is_causal

    content = dict(shape)
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.device(device):
        # transformers gives from_config no annotations on its Auto classes
        backbone: PreTrainedModel = cast("Any", family_of(config).auto_class).from_config(config, dtype=DTYPES[dtype])
    prepare_backbone(backbone)
    spec = TextSpec(("lasttoken",) if is_causal(config) else ("mean",), int(config.max_position_embeddings))
    return TextEncoder("proof", backbone=backbone, tokenizer=tokenizer or tokenizer_facts(spec.max_length), spec=spec)


LORA: Any = SimpleNamespace(lora_r=16, lora_alpha=None, lora_dropout=0.0, lora_target_modules="auto", lora_towers="all")
"""Stands for AdapterKeys, which need pydantic."""


def add_lora(encoder: Encoder) -> None:
    """Add adapters, with random numbers where they begin with zeros: these would hide half of the gradients."""
    import torch

    from vembed.models.adapters import add_adapters

    add_adapters(encoder, LORA)
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)


def workload_of(encoder: Encoder, setting: Setting, pairs: int, autocast: torch.dtype | None = None) -> Workload:
    """Return a batch of texts of lognormal lengths, median 40 tokens."""
    import numpy as np
    import torch
    from engine_workload import Workload, token_ids

    rng = np.random.default_rng(0)
    columns = (token_ids(pairs, "mixed", 40, rng), token_ids(pairs, "mixed", 40, rng))
    return Workload(torch.device(setting.device), encoder, None, columns, autocast, None)


def engine_of(workload: Workload, tokens: int, retain: float = 0.0, *, repairs: bool = True) -> GradCacheEngine:
    """Return an engine with chunks of so many tokens; without repairs a step that doesn't fit is an error."""
    import torch

    from vembed.gradcache.chunks import ChunkBudget
    from vembed.gradcache.engine import EngineOptions, GradCacheEngine
    from vembed.losses.infonce import InfoNCE

    dtype = next(workload.encoder.parameters()).dtype
    loss_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    loss = InfoNCE(temperature=0.05, dtype=loss_dtype).to(workload.device)
    budget = ChunkBudget(1 << 20, tokens, bucketed=workload.device.type != "cpu")
    options = EngineOptions(budget, workload.device, retain, autocast_dtype=workload.autocast, oom_retry=repairs)
    return GradCacheEngine(loss, options, [each for each in workload.encoder.parameters() if each.requires_grad])


def take_gradients(encoder: Encoder) -> dict[str, Tensor]:
    """Take the gradients out of a model."""
    found = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    encoder.zero_grad(set_to_none=True)
    return found


def largest_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the largest difference of a parameter's gradient, relative to its norm; zero in truth is left out."""
    if found.keys() != truth.keys():
        return float("inf")
    norms = {name: float(each.norm()) for name, each in truth.items()}
    floor = 1e-6 * max(norms.values())
    return max(float((found[name] - truth[name]).norm()) / norm for name, norm in norms.items() if norm > floor)


def whole_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the difference of all gradients together, relative to their norm."""
    square = sum(float((found[name] - each).square().sum()) for name, each in truth.items())
    return float((square / sum(float(each.square().sum()) for each in truth.values())) ** 0.5)
