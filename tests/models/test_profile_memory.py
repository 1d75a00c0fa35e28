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
from model_cases import POSITIONS, wordpiece_tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, Transformer
from transformers import BertConfig, BertModel

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory_prediction.py"

CASES = (
    "BERT, half", "BERT, gradient", "BERT, bfloat16, half", "BERT, bfloat16, check", "BERT, LoRA",
    "BERT, 2 ranks, repl", "BERT, 2 ranks, fsdp fast, bf16", "BERT, 2 ranks, fsdp sharded", "CLIP, nothing",
    "CLIP, all", "BERT + ViT", "Qwen3-VL, nothing", "Qwen3-VL, all", "Qwen3-VL, check", "Qwen3-VL, bfloat16",
    "tiny-clip", "ColBERT", "MAE, half kept", "static",
)  # fmt: skip
"""Beginnings of names: text, pictures, both stacks in a call, retention, recomputation, mixed precision, adapters, two
ranks, from scratch."""


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_prediction", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_prediction", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("bf16", "retain"), [(False, 0.5), (True, 0.0), (True, 1.0)])
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
def test_predictions_hold_within_ten_percent(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    subprocess.run([sys.executable, SCRIPT, *CASES, "--json", results], check=True)
    ratios = {each["case"]: each["ratio"] for each in json.loads(results.read_text("utf-8"))}
    assert all(any(name.startswith(case) for name in ratios) for case in CASES)
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == {}
