"""Fine-tune the same encoder on the same pairs with vembed and with sentence-transformers' cached loss.

Both train one epoch on `tldr/train.jsonl` (query to document, no hard negatives): batch 256, chunks of 32 rows, AdamW
with learning rate 5e-5 and no weight decay, cosine schedule, 10% warmup, temperature 0.05, gradients clipped to 1. Each
runs in a process of its own, one after the other; both models are then evaluated on tldr's test set by `vembed
evaluate`.

    python benchmarks/finetune.py --model PATH --data ../shared/data/tldr --output /tmp/finetune
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {"batch_size": 256, "chunk": 32, "learning_rate": 5e-5, "warmup": 0.1, "temperature": 0.05, "seed": 42}


def main() -> int:
    """Run both trainers, or, as a child process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a sentence-transformers model")
    parser.add_argument("--data", type=Path, required=True, help="the folder tldr")
    parser.add_argument(
        "--output", type=Path, required=True, help="gets both models, their evaluations and result.json"
    )
    parser.add_argument("--auto-chunk", action="store_true", help="vembed chooses its chunk budget instead of 32 rows")
    parser.add_argument("--max-steps", type=int, default=-1, help="stop after this many steps (to try the command)")
    parser.add_argument("--only", choices=("vembed", "sentence-transformers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only == "sentence-transformers":
        return _train_peer(arguments)
    if arguments.only == "vembed":
        return _train_ours(arguments)
    rows = {name: _measure(name) for name in ("sentence-transformers", "vembed")}
    _evaluate(arguments)
    return _report(arguments, rows)


def _measure(name: str) -> dict[str, float]:
    """Run one trainer in a process of its own and return its wall time, CPU time and peak memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "process_seconds": time.perf_counter() - started,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def _train_ours(arguments: argparse.Namespace) -> int:
    from vembed.entrypoints.train import main as train

    chunk = [] if arguments.auto_chunk else [f"gradient_cache_chunk_size={SETTINGS['chunk']}"]
    steps = [] if arguments.max_steps < 0 else [f"max_steps={arguments.max_steps}"]
    overrides = [
        f"model_name={arguments.model}",
        f"data_path={arguments.data / 'train.jsonl'}",
        "column_mapping.negatives=null",
        f"test_data_path={arguments.data}",
        "eval_strategy=no",
        f"output_dir={arguments.output / 'vembed'}",
        "resume=never",
        "overwrite_output_dir=true",
        f"batch_size={SETTINGS['batch_size']}",
        f"learning_rate={SETTINGS['learning_rate']}",
        "weight_decay=0.0",
        f"warmup_ratio={SETTINGS['warmup']}",
        f"temperature={SETTINGS['temperature']}",
        f"seed={SETTINGS['seed']}",
        "bm25=false",
        *chunk,
        *steps,
    ]
    return train(["--config_override", *overrides])


def _train_peer(arguments: argparse.Namespace) -> int:
    from datasets import load_dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    rows = load_dataset("json", data_files=str(arguments.data / "train.jsonl"), split="train")
    rows = rows.select_columns(["query", "positive"])
    model = SentenceTransformer(arguments.model)
    loss = CachedMultipleNegativesRankingLoss(
        model, scale=1 / SETTINGS["temperature"], mini_batch_size=int(SETTINGS["chunk"])
    )
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(arguments.output / "st-checkpoints"),
        num_train_epochs=1,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=int(SETTINGS["batch_size"]),
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=SETTINGS["warmup"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=int(SETTINGS["seed"]),
        save_strategy="no",
        report_to="none",
        use_cpu=not _has_gpu(),
        disable_tqdm=True,
        logging_steps=10,
    )
    trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=rows, loss=loss)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    model.save(str(arguments.output / "sentence-transformers"))
    (arguments.output / "st-training.json").write_text(json.dumps({"training_seconds": seconds}))
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _models(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the models to compare by name."""
    return {
        "untrained": arguments.model,
        "sentence-transformers": str(arguments.output / "sentence-transformers"),
        "vembed": str(arguments.output / "vembed" / "model"),
    }


def _evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate the untrained and both trained models with the same program."""
    models = _models(arguments).values()
    command = [sys.executable, "-m", "vembed", "evaluate", *models]
    command += ["--data", str(arguments.data), "--output", str(arguments.output / "evaluation")]
    subprocess.run(command, check=True)


def _report(arguments: argparse.Namespace, rows: dict[str, dict[str, float]]) -> int:
    """Print quality, times and their ratio, and write result.json."""
    from vembed.evaluation.benchmark.names import model_labels, unique_folders
    from vembed.evaluation.judge import verdict
    from vembed.evaluation.results import read_evaluation

    results = {}
    models = _models(arguments)
    for name, folder in zip(models, unique_folders(model_labels(list(models.values()))), strict=True):
        (found,) = (arguments.output / "evaluation" / folder).iterdir()
        results[name] = read_evaluation(found)
    metrics = (arguments.output / "vembed" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in metrics]
    batch = SETTINGS["batch_size"]
    rows["vembed"]["training_seconds"] = sum(batch / step["samples_per_second"] for step in steps[:-1] or steps)
    rows["vembed"]["padding_ratio"] = sum(step["padding_ratio"] for step in steps) / len(steps)
    rows["sentence-transformers"] |= json.loads((arguments.output / "st-training.json").read_text())
    for name, result in results.items():
        rows.setdefault(name, {})["ndcg@10"] = result.metrics["ndcg@10"]
    peer, ours = rows["sentence-transformers"], rows["vembed"]
    content = {
        "settings": SETTINGS,
        "chunk": "auto" if arguments.auto_chunk else SETTINGS["chunk"],
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "rows": rows,
        "training_time_ratio": peer["training_seconds"] / ours["training_seconds"],
        "cpu_time_ratio": peer["cpu_seconds"] / ours["cpu_seconds"],
        "vembed_against_untrained": verdict(results["untrained"], results["vembed"], "ndcg@10").sentence,
        "vembed_against_peer": verdict(results["sentence-transformers"], results["vembed"], "ndcg@10").sentence,
    }
    (arguments.output / "result.json").write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(content, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
