"""The predicted memory of a step against what a step allocates, as the benchmark compares them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.text_models import POSITIONS, wordpiece_tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, Transformer
from transformers import BertConfig, BertModel

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory_prediction.py"

CASES = (
    "BERT, half kept", "BERT, gradient checkpointing", "BERT, bfloat16, half kept", "BERT, bfloat16, checkpointing",
    "BERT, LoRA", "BERT, LoRA, bfloat16", "CLIP, nothing kept", "CLIP, all kept", "BERT + ViT, half kept",
    "BERT + ViT, the text tower", "Qwen3-VL, nothing kept", "Qwen3-VL, all kept", "Qwen3-VL, check",
    "Qwen3-VL, bfloat16, LoRA", "Qwen3-VL, tower frozen", "ColBERT, half kept", "ColBERT on pictures",
    "MAE, half kept", "static",
)  # fmt: skip
"""Text, pictures, both stacks in a call, retention, recomputation, mixed precision, adapters, from scratch."""

BY_PROCESSES = (
    "BERT, 2 ranks, repl",
    "BERT, 2 ranks, fsdp fast, bf16",
    "BERT, 2 ranks, fsdp sharded",
    "tiny-clip",
)
"""Beginnings of names."""


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_prediction", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_prediction", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("bf16", "retain"), [(False, 0.5), *(pytest.param(True, share, marks=pytest.mark.slow) for share in (0.0, 1.0))]
)
def test_the_plan_of_a_small_step_is_true(benchmark_module: ModuleType, bf16: bool, retain: float) -> None:
    shape = sys.modules["memory_cases"].bert(hidden=128, layers=3, tokens=48)
    case = benchmark_module.Case("small", shape, pairs=24, tokens=48, chunk_tokens=768, retain=retain, bf16=bf16)
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    assert predicted["total"] == pytest.approx(measured["peak"], rel=0.1)
    # What stays from step to step is counted; what comes on top is the prediction.
    stays = predicted["parameters"] + predicted["optimizer"]
    assert stays == pytest.approx(measured["stays"], rel=0.01)
    assert predicted["total"] - stays == pytest.approx(measured["peak"] - measured["stays"], rel=0.1)
    assert predicted["total"] - stays > 0.5 * stays


@pytest.mark.slow
def test_the_plan_of_texts_without_a_limit_of_length_is_true_to_the_data(benchmark_module: ModuleType) -> None:
    case = next(each for each in sys.modules["memory_cases"].CASES if each.name == "n-gram bag, all kept")
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    # Too much, never too little: what a row takes beside its n-grams is counted as if every 7 n-grams were a row.
    assert measured["peak"] <= predicted["total"] <= 1.3 * measured["peak"]


_SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 4000}
_DECODER = {**_SHAPE, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
TEXT_SHAPES: dict[str, dict[str, Any]] = {
    "modernbert": {**_SHAPE, "intermediate_size": 384, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "nomic_bert": {**_SHAPE, "intermediate_size": 512},
    "gte": {**_SHAPE, "intermediate_size": 512},
    "mistral": {**_DECODER, "sliding_window": 32},
    "llama": {**_DECODER, "is_causal": False},
    "gemma3_text": {**_DECODER, "use_bidirectional_attention": True, "sliding_window": 32},
    "t5": {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 4, "num_heads": 4, "vocab_size": 4000},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXT_SHAPES)
def test_the_plan_is_true_for_families_of_text_encoders(benchmark_module: ModuleType, kind: str) -> None:
    shape = {"model_type": kind, **TEXT_SHAPES[kind]}
    case = benchmark_module.Case(kind, shape, pairs=24, tokens=64, chunk_tokens=1024, retain=0.5)
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    assert predicted["total"] == pytest.approx(measured["peak"], rel=0.1)


_LANGUAGE = {**_DECODER, "vocab_size": 20_000, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
_LLAMA = {**_LANGUAGE, "model_type": "llama", "pad_token_id": 1}
_ROTARY = {**_LANGUAGE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}}
_SQUARES = {
    "model_type": "siglip_vision_model", "hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 3,
    "intermediate_size": 768, "image_size": 224, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_ANY_SIZE = {"hidden_size": 192, "depth": 8, "num_heads": 3, "intermediate_size": 768, "out_hidden_size": 256}
_FROM_PATCHES = {key: value for key, value in _SQUARES.items() if key != "model_type"}
VISION_LANGUAGE_SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _ROTARY,
        "vision_config": {"embed_dim": 192, "hidden_size": 256, "depth": 5, "num_heads": 3, "mlp_ratio": 4},
    },
    "qwen2_5_vl": {
        "text_config": _ROTARY,
        "vision_config": {**_ANY_SIZE, "fullatt_block_indexes": [3, 7], "window_size": 112},
    },
    "idefics3": {"text_config": _LLAMA, "vision_config": _FROM_PATCHES, "scale_factor": 2},
    "smolvlm": {"text_config": _LLAMA, "vision_config": _FROM_PATCHES, "scale_factor": 4},
    "llava_onevision": {
        "text_config": {**_LANGUAGE, "model_type": "qwen2"},
        "vision_config": _SQUARES,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [[224, 224], [224, 448], [448, 448]],
    },
    "gemma3": {
        "text_config": {
            **_LANGUAGE, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": _SQUARES,
        "mm_tokens_per_image": 64,
    },
    "paligemma": {
        "text_config": {**_LANGUAGE, "model_type": "gemma"},
        "vision_config": {**_SQUARES, "projection_dim": 256},
        "projection_dim": 256,
    },
}  # fmt: skip
_FAMILIES = {kind: {"model_type": kind, "image_token_id": 3, **own} for kind, own in VISION_LANGUAGE_SHAPES.items()}
_LATE = {
    "colpali": {"model_type": "colpali", "vlm_config": _FAMILIES["paligemma"], "embedding_dim": 128},
    "colqwen2": {"model_type": "colqwen2", "vlm_config": _FAMILIES["qwen2_vl"], "embedding_dim": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize("retain", [0.0, 1.0])
@pytest.mark.parametrize("kind", [*_FAMILIES, *_LATE])
def test_the_plan_is_true_for_vision_language_families(benchmark_module: ModuleType, kind: str, retain: float) -> None:
    shape, several = (_FAMILIES | _LATE)[kind], kind in _LATE
    pairs = 4 if kind == "llava_onevision" else 12  # its pictures are of 5 squares
    case = benchmark_module.Case(
        kind, shape, pairs=pairs, tokens=65, pictures=True, chunk_tokens=512, retain=retain, several=several
    )
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    assert predicted["total"] == pytest.approx(measured["peak"], rel=0.1)


_CONVNEXT = {"model_type": "dinov3_convnext", "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 4, 2]}
PICTURE_SHAPES: dict[str, dict[str, Any]] = {
    "dinov3_convnext": {**_CONVNEXT, "image_size": 224},
    "timm ViT": {"model_type": "timm_wrapper", "architecture": "vit_tiny_patch16_224"},
    "timm ConvNeXt": {"model_type": "timm_wrapper", "architecture": "convnext_atto"},
    "timm ResNet": {"model_type": "timm_wrapper", "architecture": "resnet10t"},
    "EVA-CLIP": {
        "embed_dim": 64,
        "vision_cfg": {"timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "token", "image_size": 224},
        "text_cfg": {"context_length": 77, "vocab_size": 4000, "width": 128, "heads": 2, "layers": 3},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PICTURE_SHAPES)
def test_the_plan_is_true_for_picture_towers(benchmark_module: ModuleType, kind: str) -> None:
    case = benchmark_module.Case(kind, PICTURE_SHAPES[kind], pairs=12, tokens=77, pictures=True, retain=0.5)
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    assert predicted["total"] == pytest.approx(measured["peak"], rel=0.1)


@pytest.mark.slow
def test_the_plan_of_a_model_that_sentence_transformers_runs_is_true(
    benchmark_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    BertModel(BertConfig(vocab_size=192, max_position_embeddings=POSITIONS, **shape)).save_pretrained(tmp_path / "bert")
    wordpiece_tokenizer().save_pretrained(tmp_path / "bert")
    modules = [Transformer(str(tmp_path / "bert")), Pooling(128, "mean"), LayerNorm(128)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"))
    texts = [" ".join("abcdefgh"[place % 8] for place in range(46 - number % 2)) for number in range(48)]
    monkeypatch.setattr(benchmark_module, "_texts", lambda case, count, encoder: encoder.featurize(texts, "document"))
    case = benchmark_module.Case("run by its library", str(tmp_path / "model"), tokens=48, chunk_tokens=768, retain=0.5)
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    assert predicted["total"] == pytest.approx(measured["peak"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_plan_of_each_way_to_train_is_true(benchmark_module: ModuleType, name: str) -> None:
    (case,) = (each for each in sys.modules["memory_cases"].CASES if each.name == name)
    predicted = benchmark_module.predict(case, "cpu")
    measured = benchmark_module.measure_step(case, torch.device("cpu"))
    assert predicted["total"] == pytest.approx(measured["peak"], rel=0.1)


@pytest.mark.slow
def test_the_plan_is_true_for_processes_that_share_a_batch(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    subprocess.run([sys.executable, SCRIPT, *BY_PROCESSES, "--json", results], check=True)
    ratios = {each["case"]: each["ratio"] for each in json.loads(results.read_text("utf-8"))}
    assert all(any(name.startswith(case) for name in ratios) for case in BY_PROCESSES)
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == {}
