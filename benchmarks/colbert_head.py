"""Train a ColBERT head and the single vector of one encoder on the same pairs, and compare them on the same queries.

Both start from the same weights and get the same budget: steps, pairs, learning rate, lengths. The single vector is the
model's own; late interaction puts a new linear layer of 128 dims behind its tokens. Each seed trains both; a query's
value is its mean over the seeds, and the interval is that of the paired difference over queries.

    nice python benchmarks/colbert_head.py --model MODEL --data ../shared/data/tldr --output /tmp/colbert-tldr
    nice python benchmarks/colbert_head.py --model MODEL --data ../shared/data/scifact --split test_unseen \
        --documents 2000 --output /tmp/colbert-scifact
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paired_runs import mean_over_seeds, smaller_set

from vembed.api.training import train
from vembed.evaluation.judge import mean_interval, verdict
from vembed.evaluation.results import read_evaluation

if TYPE_CHECKING:
    from vembed.evaluation.results import EvaluationResult

METRIC = "ndcg@10"
KINDS: dict[str, dict[str, object]] = {
    "single vector": {"loss_type": "infonce"},
    "ColBERT head": {"loss_type": "colbert", "pooling_method": "none", "projection_dim": 128},
}


def main() -> None:
    """Train every kind with every seed, one after the other, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a sentence-transformers model")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and a set in BEIR's layout")
    parser.add_argument("--split", default="test", help="whose judgements decide")
    parser.add_argument("--documents", type=int, help="search the judged documents and so many in all, evenly spaced")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="runs that have ended aren't repeated")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    test = arguments.data
    if arguments.documents is not None:
        test = smaller_set(arguments.data, arguments.split, arguments.documents, arguments.output / "data")
    found: dict[str, list[EvaluationResult]] = {kind: [] for kind in KINDS}
    for seed in arguments.seeds:
        for kind in KINDS:
            folder = arguments.output / f"{kind.split()[0]}-{seed}"
            if not (folder / "evaluation" / "final").exists():
                _train(arguments, test, kind, seed, folder)
            before, after = (read_evaluation(folder / "evaluation" / when) for when in ("baseline", "final"))
            print(f"{kind}, seed {seed}: {before.metrics[METRIC]:.4f} -> {after.metrics[METRIC]:.4f}", flush=True)
            found[kind].append(after)
    one, several = (mean_over_seeds(results, METRIC) for results in found.values())
    for kind, result in zip(KINDS, (one, several), strict=True):
        low, high = mean_interval([result], METRIC)
        print(f"{kind}: {result.metrics[METRIC]:.4f}, 95% interval {low:.4f} to {high:.4f}")
    print(f"from single vector to ColBERT head, {verdict(one, several, METRIC).sentence}")


def _train(arguments: argparse.Namespace, test: Path, kind: str, seed: int, folder: Path) -> None:
    train(
        {
            "model_name": arguments.model,
            "data_path": str(arguments.data / "train.jsonl"),
            "column_mapping": {"negatives": None},
            "test_data_path": str(test),
            "test_data_split": arguments.split,
            "eval_strategy": "no",
            "bm25": False,
            "output_dir": str(folder),
            "resume": "never",
            "overwrite_output_dir": True,
            "batch_size": arguments.batch_size,
            "max_steps": arguments.steps,
            "max_seq_length": arguments.max_length,
            "learning_rate": arguments.learning_rate,
            "warmup_ratio": 0.1,
            "temperature": 0.05,
            "seed": seed,
            **KINDS[kind],
        }
    )


if __name__ == "__main__":
    main()
