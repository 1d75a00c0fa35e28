"""The examples of the nearest peer, key by key: they pass validation, or a line says why not and what does it here."""

from typing import Any

import pytest

from vembed.config.load import LoadedConfig, load_values
from vembed.errors import ConfigError

ALWAYS = {
    "data_path": "data/train.jsonl", "val_data_path": "data/val.jsonl", "output_dir": "experiments/output", "epochs": 3,
}  # fmt: skip
PICTURES = ALWAYS | {"image_root": "data/images"}
PRODUCTS = {
    "data_path": "data/products/train.jsonl", "val_data_path": "data/products/val.jsonl",
    "image_root": "data/products", "output_dir": "experiments/output_products", "retrieval_mode": "i2i",
    "report_to": "none", "logging_steps": 10, "save_steps": 1000, "batch_size": 128, "learning_rate": 1e-4,
    "epochs": 20,
}  # fmt: skip
TEXTS = ALWAYS | {
    "retrieval_mode": "t2t", "use_lora": True, "use_gradient_cache": True, "gradient_cache_chunk_size": 64,
    "batch_size": 256, "validate_data": True, "num_workers": 4, "pin_memory": True, "persistent_workers": True,
    "warmup_ratio": 0.1,
}  # fmt: skip
CLIP = PICTURES | {
    "model_name": "openai/clip-vit-base-patch32", "encoder_mode": "clip", "retrieval_mode": "t2i", "use_lora": True,
    "batch_size": 64,
}  # fmt: skip
QWEN_VL = PICTURES | {
    "model_name": "Qwen/Qwen3-VL-Embedding-2B", "encoder_mode": "qwen-vl", "retrieval_mode": "t2i",
    "attn_implementation": "flash_attention_2", "torch_dtype": "bfloat16", "batch_size": 128, "learning_rate": 2e-5,
    "loss_type": "infonce", "use_gradient_cache": True, "gradient_cache_chunk_size": 64,
    "gradient_checkpointing": True, "use_lora": True,
}  # fmt: skip
DINO_TOKENS = PRODUCTS | {
    "model_name": "facebook/dinov2-base", "encoder_mode": "dino", "use_lora": True, "loss_type": "colbert",
    "pooling_method": "none", "topk_tokens": 32, "projection_dim": 128, "eval_batch_size": 32,
    "use_gradient_cache": True,
}  # fmt: skip
QWEN = ALWAYS | {"encoder_mode": "qwen", "use_lora": True, "use_gradient_cache": True, "gradient_cache_chunk_size": 4}

EXAMPLES: dict[str, dict[str, Any]] = {
    "bert": TEXTS | {"model_name": "bert-base-uncased", "encoder_mode": "bert"},
    "bge": TEXTS | {"model_name": "BAAI/bge-base-en-v1.5", "encoder_mode": "bge"},
    "clip": CLIP | {
        "batch_size": 1024, "use_gradient_cache": True, "gradient_cache_chunk_size": 128, "prefetch_factor": 4,
        "enable_image_cache": True, "epochs": 20, "num_workers": 8,
    },
    "clip triplet": CLIP | {"loss_type": "triplet", "use_gradient_cache": False},
    "clip cosent": CLIP | {"loss_type": "cosent", "use_gradient_cache": False},
    "clip distillation": CLIP | {
        "use_mrl": True, "teacher_model_name": "openai/clip-vit-large-patch14", "distillation_alpha": 0.5,
        "distillation_temperature": 2.0, "distillation_loss_type": "kl", "num_gpus": 2,
    },
    "siglip": PICTURES | {
        "model_name": "google/siglip-base-patch16-224", "encoder_mode": "siglip", "use_lora": True,
        "loss_type": "sigmoid", "batch_size": 1024, "learning_rate": 1e-4, "use_gradient_cache": True,
        "gradient_cache_chunk_size": 128,
    },
    "dinov2": PRODUCTS | {"model_name": "facebook/dinov2-base", "encoder_mode": "dino", "eval_batch_size": 32},
    "dinov3": PRODUCTS | {"model_name": "facebook/dinov3-vitb16-pretrain-lvd1689m", "encoder_mode": "dino"},
    "mae": PRODUCTS | {
        "model_name": "facebook/vit-mae-base", "encoder_mode": "mae", "pooling_method": "mean", "use_lora": False,
        "batch_size": 1024, "gradient_cache_chunk_size": 128, "use_gradient_cache": True, "eval_batch_size": 256,
    },
    "dinov2 colbert": DINO_TOKENS,
    "dinov2 colbert, small dev set": DINO_TOKENS | {"val_data_path": "data/products/val_small.jsonl"},
    "dinov2 and bert": PICTURES | {
        "model_name": "facebook/dinov2-small", "encoder_mode": "composed", "retrieval_mode": "i2i", "use_lora": True,
        "learning_rate": 1e-4, "use_gradient_cache": True,
    },
    "qwen3 text": ALWAYS | {
        "model_name": "Qwen/Qwen3-Embedding-8B", "encoder_mode": "qwen", "retrieval_mode": "t2t",
        "attn_implementation": "flash_attention_2", "torch_dtype": "bfloat16", "batch_size": 128, "use_lora": True,
        "loss_type": "infonce", "use_gradient_cache": True, "gradient_checkpointing": True,
    },
    "qwen3-vl 2B": QWEN_VL | {"use_mrl": True, "mrl_dims": [1536, 1024, 768, 512, 256, 128, 64]},
    "qwen3-vl 8B": QWEN_VL | {
        "model_name": "Qwen/Qwen3-VL-Embedding-8B", "use_mrl": True, "mrl_dims": [4096, 2048, 1024, 512],
    },
    "qwen3-vl 8B sharded": QWEN_VL | {
        "model_name": "Qwen/Qwen3-VL-Embedding-8B", "use_fsdp": True, "use_mrl": True, "mrl_dims": [1024],
    },
    "qwen3-vl in-batch hard": QWEN_VL | {
        "loss_type": "in_batch_hard", "hard_topk": 8, "use_all_negatives": False, "gradient_cache_chunk_size": 2,
        "temperature": 0.07,
    },
    "qwen3-vl hard mining": QWEN_VL | {
        "enable_hard_mining": True, "hard_mining_mode": "in_batch", "hard_mining_topk": 16, "hard_mining_lambda": 0.3,
        "hard_mining_temperature": 0.07, "hard_mining_bank_size": 65_536, "hard_mining_bank_momentum": 0.999,
        "gradient_cache_chunk_size": 2,
    },
    "qwen3-vl memory bank": QWEN_VL | {
        "loss_type": "contrastive_with_bank", "bank_size": 65_536, "bank_dim": 3584, "bank_momentum": 0.999,
        "hard_topk": 16, "lambda_bank": 0.5, "gradient_cache_chunk_size": 2,
    },
    "qwen colbert": QWEN | {
        "model_name": "Qwen/Qwen2-7B-Instruct", "retrieval_mode": "t2t", "loss_type": "colbert",
        "pooling_method": "none", "projection_dim": 128, "batch_size": 64,
    },
    "qwen m2i": QWEN | PICTURES | {
        "model_name": "Qwen/Qwen2-VL-7B-Instruct", "encoder_mode": "qwen-vl", "retrieval_mode": "m2i",
        "batch_size": 128,
    },
    "qwen m2t": QWEN | PICTURES | {
        "model_name": "Qwen/Qwen2-7B-Instruct", "retrieval_mode": "m2t", "batch_size": 128,
    },
}  # fmt: skip
"""Name -> the keys and values of a file."""

REFUSED = {
    "clip distillation": [
        "use_mrl: true contradicts mrl_dims",
        "teacher_model_name: nothing reads the teacher",
        "distillation_temperature: distillation_temperature has no effect with loss_type infonce; remove it or set",
    ],
    "qwen3-vl hard mining": [
        "enable_hard_mining: true: infonce learns",
        *(f"hard_mining_{name}: " for name in ("mode", "topk", "lambda", "temperature")),
        *(f"hard_mining_bank_{name}: " for name in ("size", "momentum")),
    ],
    "qwen3-vl memory bank": [
        "loss_type: 'contrastive_with_bank': vembed has no memory bank: use_gradient_cache",
        *(f"{name}: " for name in ("bank_size", "bank_dim", "bank_momentum", "lambda_bank")),
    ],
}
"""Name -> the beginning of each line that says why."""


def load(name: str) -> LoadedConfig:
    return load_values(EXAMPLES[name], {})


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in REFUSED])
def test_an_example_passes_validation_and_says_what_is_always_on(name: str) -> None:
    loaded = load(name)
    assert loaded.config.model_name == EXAMPLES[name]["model_name"]
    said = {note.split()[0] for note in loaded.notes}
    assert said == EXAMPLES[name].keys() & {"validate_data", "persistent_workers", "use_mrl", "enable_image_cache"}


@pytest.mark.parametrize("name", REFUSED)
def test_an_example_is_refused_for_what_nothing_does_here_and_for_nothing_else(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    lines = str(caught.value).replace("configuration: ", "").splitlines()
    for beginning in REFUSED[name]:
        assert any(line.startswith(beginning) for line in lines), (beginning, lines)
    assert len(lines) == len(REFUSED[name]), lines


def test_there_are_23_of_them() -> None:
    assert len(EXAMPLES) == 23
    assert len(EXAMPLES) - len(REFUSED) == 20
