"""Compare the strategies for the shipped examples as the planner computes them: `python benchmarks/strategy_table.py`.

Prints Markdown tables; with `--machines` the one that docs/devices.md shows a part of. No model and no data is read:
shapes lie in configs/shapes. Ways that shard over a part of the devices or live in the host's memory are left out
unless one of them is chosen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

EXAMPLES = (
    ("configs/clip_ddp.yaml", "4xA100-40GB", "configs/shapes/clip_vit_base_patch32.json"),
    ("configs/qwen3_vl_2b_gradcache.yaml", "4xA100-80GB", "configs/shapes/qwen3_vl_2b.json"),
    ("configs/qwen3_vl_8b_fsdp_lora.yaml", "8xA100-80GB", "configs/shapes/qwen3_vl_8b.json"),
)

MACHINES = ("1xRTX4090-24GB", "1xH100-80GB", "1xH200-141GB", "8xH100-80GB")
MODELS = ("bert_base", "qwen3_0_6b", "qwen3_4b", "qwen3_8b")
RUN = ("batch_size=4096", "max_seq_length=512")
"""What is planned for each machine: texts of up to 512 tokens, 4,096 pairs a device."""

MACHINE_HEADS = ("Model", "Devices", "Way", "GiB per device", "Tokens of a call", "Graphs kept", "Relative speed")

HEADS = ("Way", "GiB per device", "Fits", "Relative speed", "Scaling", "GiB sent per step")


def command_of(config: str, devices: str, shape: str) -> list[str]:
    """Return the words of the command that plans an example."""
    return ["plan", config, "--devices", devices, "--model-config", shape]


def read_plan(words: list[str]) -> dict[str, Any]:
    """Return what the planner says.

    Raises:
        SystemExit: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "vembed", *words, "--json"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def way_of(candidate: dict[str, Any]) -> str:
    """Return what tells strategies apart, whatever they do to activations."""
    words = [candidate["strategy"]]
    if candidate["mode"] is not None:
        words += [f"{candidate['mode']}, 1/{candidate['sharding_factor']} (ZeRO-{candidate['zero_stage']})"]
    if candidate["use_lora"] and "lora" not in candidate["strategy"]:
        words.append("+ LoRA")
    if candidate["cpu_offload"]:
        words.append("+ offload")
    return " ".join(words)


def rows_of(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each way: the chosen candidate, else the fastest that fits, else the smallest."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for candidate in plan["candidates"]:
        is_partial = candidate["cpu_offload"] or candidate["sharding_factor"] not in (1, plan["world_size"])
        if is_partial and not candidate["recommended"]:
            continue
        ways.setdefault(way_of(candidate), []).append(candidate)
    rows: list[tuple[str, ...]] = []
    for way, candidates in ways.items():
        best = max(
            candidates,
            key=lambda each: (
                each["recommended"],
                each["fits"],
                each["relative_speed"] if each["fits"] else -each["least_bytes"],
            ),
        )
        rows.append(
            (
                f"**{way}** (chosen)" if best["recommended"] else way,
                f"{best['bytes_per_device']['total'] / (1 << 30):.1f}",
                "yes" if best["fits"] else "no",
                f"{best['relative_speed']:.2f}",
                f"{best['scaling_efficiency']:.0%}",
                f"{best['communication_bytes'] / (1 << 30):.2f}",
            )
        )
    return rows


def machine_row(model: str, devices: str) -> tuple[str, ...]:
    """Return what the planner chooses for a model on some devices."""
    words = command_of("configs/finetune_text.yaml", devices, f"configs/shapes/{model}.json")
    plan = read_plan([*words, "--records", "1000000", "--config_override", *RUN])
    best = next(each for each in plan["candidates"] if each["recommended"])
    way = way_of(best) + (", checkpointing" if best["gradient_checkpointing"] else "")
    return (
        model,
        devices,
        way if plan["fits"] else f"none fits; nearest: {way}",
        f"{best['bytes_per_device']['total'] / (1 << 30):.1f}",
        f"{plan['gradient_cache_chunk_tokens']:,}",
        f"{best['retain']:.2f}",
        f"{best['relative_speed']:.2f}",
    )


def main() -> None:
    """Print a table for each example, or one of machines and models."""
    if sys.argv[1:] == ["--machines"]:
        rows = (machine_row(model, devices) for model in MODELS for devices in MACHINES)
        for cells in (MACHINE_HEADS, tuple("---" for _ in MACHINE_HEADS), *rows):
            print(f"| {' | '.join(cells)} |")
        return
    for example in EXAMPLES:
        words = command_of(*example)
        lines = [HEADS, tuple("---" for _ in HEADS), *rows_of(read_plan(words))]
        print(f"```bash\nvembed {' '.join(words)}\n```\n")
        print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
        print()


if __name__ == "__main__":
    main()
