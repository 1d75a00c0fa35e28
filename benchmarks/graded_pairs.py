"""Train on graded pairs of a description and a command, and say how far similarities come to follow the grades.

A set in tldr's layout names each example PAGE#N, the page PLATFORM/TOOL-SUBCOMMAND. The description of an example and
the command of another one make a pair: of one page, grade 1; of two pages of one tool, 0.5; of two tools, 0. Each
example gives one of each kind, where there is one. Training takes the examples of one set, the test those of another,
whose tools are others. The measure is Spearman's rank correlation of cosine similarity and grade; its interval comes
from drawing the test's descriptions again, 2,000 times, the same ones for both models.

    python benchmarks/graded_pairs.py --model MODEL --train tldr/dev --test tldr --output out
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import spearmanr

import vembed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.batch import Side

DRAWS = 2000
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
            "resume": "never",
            "overwrite_output_dir": True,
            "save_strategy": "no",
            "eval_strategy": "no",
            "bm25": False,
            "batch_size": arguments.batch_size,
            "epochs": arguments.epochs,
            "learning_rate": arguments.learning_rate,
            "weight_decay": 0.0,
            "warmup_ratio": 0.1,
            "seed": arguments.seed,
        }
    )
    untrained = run / "initial_model"  # written of a model that starts from random weights
    before = _similarities(str(untrained) if untrained.exists() else arguments.model, test)
    print(_sentence(before, _similarities(str(run / "model"), test), test))


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


def _similarities(model: str, test: Path) -> NDArray[np.float32]:
    """Return the cosine similarity of each pair (P,)."""
    loaded, rows = vembed.load(model), _read(test)
    queries, documents = ([row[column] for row in rows] for column in ("query", "positive"))
    queries_PE, documents_PE = _vectors(loaded, queries, "query"), _vectors(loaded, documents, "document")
    similarities_P: NDArray[np.float32] = (queries_PE * documents_PE).sum(axis=1)
    return similarities_P


def _vectors(model: vembed.EmbeddingModel, texts: list[str], side: Side) -> NDArray[np.float32]:
    """Return each text's vector (P, E); a text that comes again is encoded once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    return model.encode(places, side)[[places[text] for text in texts]]


def _sentence(before_P: NDArray[np.float32], after_P: NDArray[np.float32], test: Path) -> str:
    """Return both correlations, and the interval of their difference over other descriptions."""
    rows = _read(test)
    grades_P = np.asarray([row["label"] for row in rows])
    descriptions: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        descriptions.setdefault(row["query"], []).append(place)
    places = [np.asarray(each) for each in descriptions.values()]

    def correlations(chosen_P: NDArray[np.int64]) -> tuple[float, float]:
        one, other = (spearmanr(each[chosen_P], grades_P[chosen_P]).statistic for each in (before_P, after_P))
        return float(one), float(other)

    draw = np.random.default_rng(0)
    drawn = [
        correlations(np.concatenate([places[each] for each in draw.integers(len(places), size=len(places))]))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile([after - before for before, after in drawn], (0.025, 0.975))
    before, after = correlations(np.arange(len(rows)))
    return (
        f"Spearman {before:.4f} -> {after:.4f} ({after - before:+.4f}, 95% interval {low:+.4f} to {high:+.4f}; "
        f"{len(rows)} pairs of {len(places)} descriptions)"
    )


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
