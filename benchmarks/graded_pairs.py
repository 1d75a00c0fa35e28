"""Train on graded pairs of a description and a command, and say how far similarities come to follow the grades.

A set in tldr's layout names each example PAGE#N, the page PLATFORM/TOOL-SUBCOMMAND. The description of an example and
the command of another one make a pair: of one page, grade 1; of two pages of one tool, 0.5; of two tools, 0. Each
example gives one of each kind, where there is one. Training takes the examples of one set, the test those of another,
whose tools are others. It is measured as by `vembed evaluate --label-kind grade`: Spearman's rank correlation of
similarity and grade, and the interval of the difference over other descriptions.

    python benchmarks/graded_pairs.py --model MODEL --train tldr/dev --test tldr --output out
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from paired_runs import ONLY_TRAINS

import vembed
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.evaluation.graded import load_pairs, measure_pairs, size_text

GRADES = (1.0, 0.5, 0.0)
SIDES = ("train", "test")


def main() -> None:
    """Write both sets of pairs, train, and print the correlation before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of the encoder, or builtin:NAME")
    parser.add_argument("--train", type=Path, required=True, help="set whose pairs train")
    parser.add_argument("--test", type=Path, required=True, help="set whose pairs decide")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--loss", default="cosent", help="a loss that takes graded pairs")
    parser.add_argument("--scale", type=float, help="cosent_scale, of the losses that take one (default: its default)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    train, test = (write_pairs(arguments.output / f"{name}.jsonl", getattr(arguments, name)) for name in SIDES)
    run = arguments.output / "run"
    vembed.train(
        {
            "model_name": arguments.model,
            "data_path": str(train),
            "label_kind": "grade",
            "loss_type": arguments.loss,
            "output_dir": str(run),
            **ONLY_TRAINS,
            "batch_size": arguments.batch_size,
            "epochs": arguments.epochs,
            "learning_rate": arguments.learning_rate,
            "seed": arguments.seed,
            **({} if arguments.scale is None else {"cosent_scale": arguments.scale}),
        }
    )
    untrained = run / "initial_model"  # written of a model that starts from random weights
    models = {"before": str(untrained) if untrained.exists() else arguments.model, "after": str(run / "model")}
    pairs = load_pairs(DataSource(str(test), "test", DataKeys(label_kind="grade")))
    similarities = {name: pairs.similarities(vembed.load(model).item_encoder(256)) for name, model in models.items()}
    outcome = measure_pairs(pairs, similarities)
    print(f"{size_text(outcome)}: {outcome.verdicts['after'].sentence}")


def write_pairs(path: Path, folder: Path) -> Path:
    """Write a set's graded pairs as rows of training."""
    descriptions = {row["_id"].removeprefix("q:"): row["text"] for row in _read(folder / "queries.jsonl")}
    commands = {row["_id"]: row["text"] for row in _read(folder / "corpus.jsonl")}
    drawn = random.Random(0)
    rows = []
    for one, description in descriptions.items():
        others: dict[float, list[str]] = {grade: [] for grade in GRADES}
        for other in commands:
            if other != one:
                others[_grade(one, other)].append(other)
        for grade, found in others.items():
            if found:
                rows.append({"query": description, "positive": commands[drawn.choice(found)], "label": grade})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def _grade(one: str, other: str) -> float:
    pages = [each.partition("#")[0] for each in (one, other)]
    if pages[0] == pages[1]:
        return 1.0
    tools = [page.rpartition("/")[2].partition("-")[0] for page in pages]
    return 0.5 if tools[0] == tools[1] else 0.0


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
