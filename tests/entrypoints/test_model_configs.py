"""configs/models: every file is valid, and trains a step with a tiny model of the real class in the model's place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from kit.late_models import write_bert
from kit.picture_models import OPEN_CLIP_CONFIG, picture, write_open_clip, write_picture_model
from kit.runs import run_keys, write_rows
from kit.text_models import write_model
from vision_language_cases import write_vision_language

from vembed.config.load import load_config
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_there_is_a_file_for_each_family() -> None:
    assert len(NAMES) >= 20
    assert set(NAMES) == set(STAND_INS)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_valid_and_begins_with_two_lines_of_comment(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    config = load_config(path).config
    assert (config.data_path, config.output_dir) != (None, "outputs")
    comments = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    assert len(comments) == 2
    assert path.read_text("utf-8").startswith("\n".join(comments))


def _text(kind: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"model_name": str(write_model(folder, kind))}


def _picture(kind: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"model_name": str(write_picture_model(folder, kind))}


def _vision_language(kind: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"model_name": str(write_vision_language(folder, kind)), "image_tokens": 16}


def _colbert(folder: Path) -> dict[str, Any]:
    return {"model_name": str(write_bert(folder)), "projection_dim": 16}


STAND_INS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **dict.fromkeys(("bert", "bge", "e5", "gte", "minilm"), _text("bert")),
    "multilingual_e5": _text("xlm-roberta"),
    "modernbert": _text("modernbert"),
    "nomic": _text("nomic_bert"),
    "qwen3_embedding": _text("qwen3"),
    "embeddinggemma": _text("bidirectional gemma3"),
    "e5_mistral": _text("mistral"),
    "llama_bidirectional": _text("llama"),
    "t5": _text("t5"),
    "static": lambda _: {"model_name": "builtin:static"},
    "clip": _picture("clip"),
    "siglip": _picture("siglip"),
    "siglip2": _picture("siglip2"),
    "open_clip": lambda folder: {"model_name": str(write_open_clip(folder))},
    "eva_clip": lambda folder: {"model_name": str(write_open_clip(folder, EVA_CONFIG))},
    "dinov2": _picture("dinov2"),
    "dinov3": _picture("dinov3"),
    "mae": _picture("mae"),
    "vit": _picture("vit"),
    "composed": lambda folder: {
        "text_model_name": str(write_model(folder / "text", "bert")),
        "image_model_name": str(write_picture_model(folder / "image", "dinov2")),
    },
    "colbert": _colbert,
    "dinov2_colbert": lambda folder: _picture("dinov2")(folder) | {"projection_dim": 16, "topk_tokens": 4},
    "qwen3_vl": _vision_language("qwen3_vl"),
    "qwen2_vl": _vision_language("qwen2_vl"),
    "colqwen": _vision_language("colqwen2"),
    "smolvlm": lambda folder: {"model_name": str(write_vision_language(folder, "smolvlm"))},
}
"""File -> what stands in for its model: the keys that name it, where it is written."""

EVA_CONFIG: dict[str, Any] = {
    **OPEN_CLIP_CONFIG,
    "vision_cfg": {"timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "token", "timm_proj": None,
                   "image_size": 224},
}  # fmt: skip

NUM_ROWS = 12


def rows_for(mode: str, folder: Path) -> list[dict[str, str]]:
    """Write pictures and return rows of a retrieval mode."""
    for number in range(2 * NUM_ROWS):
        (folder / f"{number}.png").write_bytes(picture(number).read())
    texts = [f"a thing of number {number}" for number in range(2 * NUM_ROWS)]
    kinds = {"t": ("query", "positive"), "i": ("query_image", "positive_image")}
    values = {"t": texts, "i": [f"{number}.png" for number in range(2 * NUM_ROWS)]}
    query, _, document = mode
    return [
        {kinds[query][0]: values[query][number], kinds[document][1]: values[document][number + NUM_ROWS]}
        for number in range(NUM_ROWS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_trains_a_step_with_a_tiny_model_of_its_class(name: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text("utf-8"))
    published = keys.get("model_name", name).rpartition("/")[2].replace(":", "-")
    keys |= STAND_INS[name](tmp_path / published)
    mode = keys.get("retrieval_mode", "t2i" if "image_tokens" in keys else "t2t")
    rows = write_rows(tmp_path / "rows.jsonl", rows_for(mode, tmp_path))
    del keys["output_dir"]
    keys |= {
        "data_path": str(rows), "val_data_path": str(rows), "batch_size": 6, "max_steps": 1, "bm25": False,
        "report_to": "none", "eval_strategy": "no", "num_workers": 0, "warmup_ratio": 0.0,
    }  # fmt: skip
    keys["max_seq_length"] = "auto" if "max_seq_length" in keys else None
    if keys.get("trainable", "").startswith("last_"):
        keys["trainable"] = "last_1_layers"
    keys["mrl_dims"] = [16, 8] if "mrl_dims" in keys else None
    run = run_keys(tmp_path, {key: value for key, value in keys.items() if value is not None})
    assert run.code == 0, run.err
    (row,) = run.rows
    assert math.isfinite(row["loss"])
    assert row["grad_norm"] > 0
    load_encoder(ModelKeys(model_name=str(run.folder / "model")))
