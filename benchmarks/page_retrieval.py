"""Train a tiny vision-language model from random weights to find pages: one vector a page, and one for each token.

The network is transformers' own Qwen3-VL class; only its sizes are small. Both runs have the same network, data
(`builtin:pages`), batch and steps, and are judged on the test set, whose lines no training page holds.

    python benchmarks/page_retrieval.py --output /tmp/pages
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

WIDTH = 64
PATCH, MERGE = 16, 1
PAGE_TOKENS = 84
"""A page at half its size: 12 x 7 squares of 16 pixels, one for each line in the height."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VIDEO = "<|video_pad|>"
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>{% endfor %}"
)

RUNS: dict[str, dict[str, Any]] = {
    "one vector a page": {"loss_type": "infonce"},
    "a vector for each token": {"loss_type": "colbert", "pooling_method": "none", "projection_dim": 32},
}


def main() -> int:
    """Train both and print how they did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--only", choices=RUNS)
    arguments = parser.parse_args()
    network = write_network(arguments.output / "network")
    for name, keys in RUNS.items():
        if arguments.only in (None, name):
            train(arguments, network, name, keys)
    return 0


def train(arguments: argparse.Namespace, network: Path, name: str, keys: dict[str, Any]) -> None:
    """Train one of them and print its verdict."""
    import vembed

    started = time.perf_counter()
    result = vembed.train(
        {
            "model_name": str(network),
            "data_path": "builtin:pages",
            "test_data_path": "builtin:pages",
            "eval_strategy": "no",
            "document_prompt": "",
            "query_prompt": "",
            "image_tokens": PAGE_TOKENS,
            "max_seq_length": 256,
            "global_batch_size": arguments.batch,
            "max_steps": arguments.steps,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.1,
            "temperature": 0.05,
            "seed": 1,
            "bm25": False,
            "logging_steps": 20,
            "resume": "never",
            "overwrite_output_dir": True,
            "output_dir": str(arguments.output / name.replace(" ", "-")),
            **keys,
        }
    )
    print(f"{name}: {time.perf_counter() - started:.0f} s. {result.verdict.sentence}", flush=True)


def write_network(folder: Path) -> Path:
    """Write a Qwen3-VL with random weights, whose tokenizer knows the words of the questions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLModel,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    from vembed.data.builtin.pages import pages_of, question_of

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[*SPECIALS, VIDEO], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((question_of(line) for lines in pages_of("train") for line in lines), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIALS[0], additional_special_tokens=[*SPECIALS, VIDEO]
    )
    tokenizer.model_max_length = 1024
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", VIDEO, "<|vision_start|>", "<|vision_end|>")
    common: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "initializer_range": WIDTH**-0.5}
    ids: dict[str, Any] = {
        name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, tokens, strict=True)
    }
    config = Qwen3VLConfig(
        text_config={
            **common,
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            **common,
            "depth": 2,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **ids,
    )
    side = PATCH * MERGE
    images = Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 4 * side**2, "longest_edge": PAGE_TOKENS * side**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    torch.manual_seed(0)
    Qwen3VLModel(config).save_pretrained(folder)
    Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
