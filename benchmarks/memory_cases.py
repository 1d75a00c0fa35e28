"""Models, batches and ways to train whose memory `memory_prediction.py` predicts and measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.gradcache.chunks import RowAssignment

if TYPE_CHECKING:
    from vembed.distributed.fsdp import ShardingMode


@dataclass(frozen=True, slots=True)
class Case:
    """One model and one way to train it.

    Attributes:
        name: For people.
        model: A model's name, or the shape of one: config.json of transformers, model_cfg of open_clip. Of two shapes
            the first is of a text tower, the second of an image tower that is joined to it.
        pairs: Queries of the batch; each has one document.
        tokens: Tokens of each text.
        pictures: Whether the documents are pictures; the queries are too where the model reads no texts.
        chunk_tokens: Most padded tokens of a chunk.
        retain: Share of the batch whose graphs are kept; None leaves it to the plan, which must have room for all.
        gradient_checkpointing: Whether layers are recomputed.
        bf16: Whether the encoder computes in bfloat16.
        lora: Whether adapters train beside a frozen base.
        trainable: What trains otherwise.
        several: Whether each token gives a vector, under the ColBERT loss.
        ranks: Processes that share the batch, texts only.
        fsdp_mode: What stays whole during a step; None replicates.
        cpu_offload: Whether shards and optimizer live in the host's memory.
    """

    name: str
    model: str | dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]
    pairs: int = 24
    tokens: int = 64
    pictures: bool = False
    chunk_tokens: int = 1024
    retain: float | None = 0.0
    gradient_checkpointing: bool = False
    bf16: bool = False
    lora: bool = False
    trainable: str = "all"
    several: bool = False
    ranks: int = 1
    fsdp_mode: ShardingMode | None = None
    cpu_offload: bool = False

    @property
    def assignment(self) -> RowAssignment:
        """The rows of each rank: its share of the queries, and their documents."""
        shares = np.array_split(np.arange(self.pairs), self.ranks)
        return RowAssignment(tuple(np.concatenate([share, self.pairs + share]) for share in shares))


def bert(hidden: int = 384, layers: int = 6, tokens: int = 64) -> dict[str, Any]:
    """Return the shape of a BERT that takes texts of so many tokens."""
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": tokens,
    }


def qwen_vl(hidden: int = 256, layers: int = 7) -> dict[str, Any]:
    """Return the shape of a Qwen3-VL whose language model takes what three layers of its picture stack see."""
    return {
        "model_type": "qwen3_vl",
        "image_token_id": 3,
        "text_config": {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "head_dim": 64,
            "intermediate_size": 3 * hidden,
            "vocab_size": 20_000,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [12, 10, 10]},
        },
        "vision_config": {
            "hidden_size": 192,
            "depth": layers,
            "num_heads": 3,
            "intermediate_size": 768,
            "out_hidden_size": hidden,
            "deepstack_visual_indexes": [1, 3, 5],
        },
    }


def clip(text: int = 256, vision: int = 384, layers: int = 6, tokens: int = 48) -> dict[str, Any]:
    """Return the shape of a CLIP whose pictures are 49 patches."""
    stack = {"num_hidden_layers": layers}
    return {
        "model_type": "clip",
        "projection_dim": text,
        "text_config": {
            **stack,
            "hidden_size": text,
            "num_attention_heads": text // 64,
            "intermediate_size": 4 * text,
            "vocab_size": 20000,
            "max_position_embeddings": tokens,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        "vision_config": {
            **stack,
            "hidden_size": vision,
            "num_attention_heads": vision // 64,
            "intermediate_size": 4 * vision,
            "image_size": 224,
            "patch_size": 32,
        },
    }


def mae(hidden: int = 384, layers: int = 6) -> dict[str, Any]:
    """Return the shape of a masked autoencoder's encoder, for pictures of 49 patches."""
    return {
        "model_type": "vit_mae",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        "image_size": 224,
        "patch_size": 32,
    }


def vit(hidden: int = 384, layers: int = 6) -> dict[str, Any]:
    """Return the shape of a ViT whose pictures are 49 patches."""
    return {**mae(hidden, layers), "model_type": "vit"}


def qwen(hidden: int = 512, layers: int = 8, tokens: int = 64) -> dict[str, Any]:
    """Return the shape of a decoder with shared key heads."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "intermediate_size": 3 * hidden,
        "vocab_size": 30000,
        "max_position_embeddings": tokens,
    }


CASES = (
    Case("BERT, nothing kept", bert()),
    Case("BERT, half kept", bert(), retain=0.5),
    Case("BERT, all kept", bert(), retain=1.0),
    Case("BERT, plain training", bert(), chunk_tokens=8192),
    Case("BERT, gradient checkpointing", bert(), chunk_tokens=2048, gradient_checkpointing=True),
    Case("BERT, bfloat16, half kept", bert(), retain=0.5, bf16=True),
    Case("BERT, LoRA", bert(), chunk_tokens=2048, lora=True),
    Case("BERT, LoRA, bfloat16", bert(512, 12), chunk_tokens=512, retain=0.5, lora=True, bf16=True),
    Case("BERT, last 2 layers", bert(), retain=1.0, trainable="last_2_layers"),
    Case("Qwen3, nothing kept", qwen()),
    Case("Qwen3, gradient checkpointing", qwen(), chunk_tokens=2048, gradient_checkpointing=True),
    Case("BERT, 2 ranks, replicated", bert(), ranks=2, retain=0.5),
    Case("BERT, 2 ranks, fsdp fast", bert(), ranks=2, fsdp_mode="fast"),
    Case("BERT, 2 ranks, fsdp lean", bert(), ranks=2, fsdp_mode="lean"),
    Case("BERT, 2 ranks, fsdp sharded", bert(), ranks=2, fsdp_mode="sharded"),
    Case("BERT, 2 ranks, fsdp fast, bf16", bert(), ranks=2, fsdp_mode="fast", bf16=True, retain=0.5),
    Case(
        "BERT, bfloat16, checkpointing",
        bert(512, 24),
        pairs=16,
        chunk_tokens=512,
        bf16=True,
        gradient_checkpointing=True,
    ),
    Case("ColBERT, half kept", bert(), retain=0.5, several=True),
    Case("ColBERT on pictures", mae(), pictures=True, several=True),
    Case("CLIP, nothing kept", clip(), tokens=48, pictures=True),
    Case("CLIP, half kept", clip(), tokens=48, pictures=True, retain=0.5),
    Case("CLIP, all kept", clip(), tokens=48, pictures=True, retain=1.0),
    Case("CLIP, the image tower", clip(), tokens=48, pictures=True, trainable="vision"),
    Case("BERT + ViT, half kept", (bert(256, tokens=48), vit()), tokens=48, pictures=True, retain=0.5),
    Case("BERT + ViT, the text tower", (bert(256), vit()), tokens=48, pictures=True, trainable="text"),
    Case("Qwen3-VL, nothing kept", qwen_vl(), tokens=65, pictures=True),
    Case("Qwen3-VL, all kept", qwen_vl(), tokens=65, pictures=True, retain=1.0),
    Case("Qwen3-VL, check", qwen_vl(), tokens=65, pictures=True, gradient_checkpointing=True),
    Case("Qwen3-VL, tower frozen", qwen_vl(), tokens=65, pictures=True, retain=1.0, trainable="text+projection"),
    Case("Qwen3-VL, bfloat16, LoRA", qwen_vl(), tokens=65, pictures=True, bf16=True, lora=True),
    Case("open_clip ViT-B-32", "open_clip:ViT-B-32", pairs=16, tokens=77, pictures=True, chunk_tokens=512),
    Case("tiny-transformer, half kept", "builtin:tiny-transformer", tokens=128, retain=0.5),
    Case("MAE, half kept", mae(), pictures=True, retain=0.5),
    Case("static", "builtin:static", pairs=256, chunk_tokens=4096),
    Case("n-gram bag, all kept", "builtin:ngram-bag", pairs=256, tokens=640, chunk_tokens=1 << 17, retain=None),
    Case("tiny-clip", "builtin:tiny-clip", pairs=512, tokens=64, pictures=True, chunk_tokens=8192),
)

SHAPES = Path(__file__).resolve().parents[1] / "configs" / "shapes"

GPU_CASES = (
    Case("GPU, BERT-base", str(SHAPES / "bert_base.json"), pairs=2048, tokens=128, chunk_tokens=16384, bf16=True),
    Case(
        "GPU, BERT-base, half kept",
        str(SHAPES / "bert_base.json"),
        pairs=256,
        tokens=128,
        chunk_tokens=8192,
        bf16=True,
        retain=0.5,
    ),
    Case(
        "GPU, Qwen3-0.6B, checkpointing",
        str(SHAPES / "qwen3_0_6b.json"),
        pairs=256,
        tokens=256,
        chunk_tokens=16384,
        bf16=True,
        gradient_checkpointing=True,
    ),
)
"""Of the sizes that a GPU is for; on a CPU only by name."""
