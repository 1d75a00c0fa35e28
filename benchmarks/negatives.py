"""Train one encoder with several kinds of negatives, and say which of them helped.

Each study trains recipes that differ in one thing, each with every seed, on the same pairs for the same number of
pairs seen, and compares them with its first recipe. A query's value is its mean over the seeds; the interval and the
p-value (Student's paired test) are those of the paired difference over queries, the p-values corrected after Holm.

    negatives   no hard negatives; those of the rows; mined: nearest, below 95% of the positive, the same by a teacher
    batches     random batches of 1,024, 256 and 64; batches of 256 and 64 whose rows are hard negatives of each other
    planted     mined negatives, 10% or 30% of them in truth relevant; with and without false_negative_filter

What has ended isn't repeated. `planted` takes tldr and judges by pages: relevant is any command of the query's page. A
row's given negatives are such commands: mining leaves them out, and they are what is planted.

    head -4400 tldr/train.jsonl > rows.jsonl
    python benchmarks/negatives.py negatives --model MODEL --rows rows.jsonl --data tldr --teacher TUNED --output out
    python benchmarks/negatives.py planted --model MODEL --data scifact --teacher MODEL --output out
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paired_runs import ONLY_TRAINS, mean_over_seeds, smaller_set

import vembed
from vembed.evaluation.judge import holm, paired_p_value, verdict
from vembed.evaluation.results import read_evaluation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vembed.evaluation.results import EvaluationResult

METRIC = "ndcg@10"
TESTED, TAUGHT = 500, 1000
"""Abstracts that `planted` tests with, and those that a teacher may learn from."""

TEACHER = "TEACHER"
"""Stands for the folder of the teacher in a recipe."""

FILTERS: dict[str, dict[str, Any]] = {
    "": {},
    ", threshold": {"false_negative_filter": "threshold"},
    ", teacher": {"false_negative_filter": "teacher", "teacher_model_name": TEACHER},
}
PLANTED = (10, 30)
"""Percent of the mined negatives."""

STUDIES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "negatives": {
        "none": ("plain", {}),
        "given": ("given", {}),
        "mined, nearest": ("nearest", {}),
        "mined, 95%": ("margin", {}),
        "mined, 95% by a teacher": ("teacher", {}),
    },
    "batches": {
        "random 1,024": ("plain", {"batch_size": 1024}),
        "random 256": ("plain", {"batch_size": 256}),
        "hard 256": ("plain", {"batch_size": 256, "batch_sampling": "hard"}),
        "random 64": ("plain", {"batch_size": 64}),
        "hard 64": ("plain", {"batch_size": 64, "batch_sampling": "hard"}),
    },
    "planted": {
        **{f"clean{name}": ("apart", keys) for name, keys in FILTERS.items()},
        **{
            f"{percent}% planted{name}": (f"planted-{percent}", keys)
            for percent in PLANTED
            for name, keys in FILTERS.items()
        },
    },
}
"""Study -> recipe -> the file that it trains on, and keys of its own. Others are held against the first recipe."""

MINING = {
    "nearest": ("plain", ["--relative-margin", "none"]),
    "margin": ("plain", []),
    "teacher": ("plain", ["--teacher", TEACHER]),
    "apart": ("all given", ["--replace", "--relative-margin", "none"]),
    "together": ("plain", ["--relative-margin", "none"]),
}
"""Mined file -> the file that it is mined for, and options of `vembed mine`."""


def main() -> None:
    """Prepare the files, train and evaluate what is missing, and print the table."""
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    test = arguments.data
    if arguments.documents is not None:
        test = smaller_set(arguments.data, arguments.split, arguments.documents, arguments.output / "test")
    if arguments.study == "planted":
        arguments.rows, test = _halves(arguments.data / "corpus.jsonl", arguments.split, arguments.output)
    recipes = {name: STUDIES[arguments.study][name] for name in arguments.only or STUDIES[arguments.study]}
    untrained = arguments.output / "untrained"
    if not untrained.exists():
        _evaluate(arguments, arguments.miner or arguments.model, test, untrained)
    found: dict[str, list[EvaluationResult]] = {name: [] for name in recipes}
    for seed in arguments.seeds:
        for name, (rows, keys) in recipes.items():
            folder = arguments.output / f"{arguments.study}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            if not folder.exists():
                _train(arguments, _file(arguments, rows), keys, seed, test, folder)
            found[name].append(read_evaluation(folder))
            print(f"{name}, seed {seed}: {found[name][-1].metrics[METRIC]:.4f}", flush=True)
    print(_table(read_evaluation(untrained), found))
    for line in _regained({name: mean_over_seeds(results, METRIC).metrics[METRIC] for name, results in found.items()}):
        print(line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", required=True, help="folder or hub id of the encoder")
    parser.add_argument("--rows", type=Path, help="JSONL of query, positive and negatives; planted makes its own")
    parser.add_argument("--data", type=Path, required=True, help="test set in BEIR's layout")
    parser.add_argument("--split", default="test", help="whose judgements decide")
    parser.add_argument("--documents", type=int, help="search the judged documents and so many in all, evenly spaced")
    parser.add_argument("--teacher", help="a better model, tuned on other rows")
    parser.add_argument("--miner", help="the model that mines, and the untrained one to compare (default: --model)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="these recipes alone, the first of them as the baseline")
    parser.add_argument("--pairs", type=int, default=2048, help="that a run sees")
    parser.add_argument(
        "--steps", type=int, help="of every run, whatever its batches (default: those that see --pairs)"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="of recipes that don't say otherwise")
    parser.add_argument("--negatives", type=int, default=1, help="of each row")
    parser.add_argument("--max-length", type=int, default=64, help="in tokens; 0: as the model has it")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="at --batch-size; scaled by the root")
    arguments = parser.parse_args()
    if (arguments.study == "planted") != (arguments.rows is None):
        parser.error("planted makes its own rows; the other studies need --rows")
    return arguments


def _file(arguments: argparse.Namespace, name: str) -> Path:
    """Return a file of training rows; write it first if it isn't there."""
    path: Path = arguments.output / f"{name}.jsonl"
    if path.exists():
        return path
    if name in MINING:
        _mine(arguments, path, *MINING[name])
    elif name.startswith("planted"):
        files = _file(arguments, "apart"), _file(arguments, "together"), arguments.rows
        _write(path, _planted(list(zip(*map(_read, files), strict=True)), int(name.partition("-")[2]) / 100))
    else:
        count = {"plain": 0, "given": arguments.negatives, "all given": None}[name]
        _write(path, ({**row, "negatives": row["negatives"][:count]} for row in _read(arguments.rows)))
    return path


def _mine(arguments: argparse.Namespace, path: Path, rows: str, options: list[str]) -> None:
    """Mine negatives among all documents of the rows, those that they give as negatives included."""
    corpus = arguments.output / "corpus.jsonl"
    texts = {text: None for row in _read(arguments.rows) for text in (row["positive"], *row["negatives"])}
    _write(corpus, ({"_id": str(place), "text": text} for place, text in enumerate(texts)))
    command = [
        "mine",
        arguments.miner or arguments.model,
        "--data",
        _file(arguments, rows),
        "--corpus",
        corpus,
        "--output",
        path,
    ]
    command += ["--negatives", arguments.negatives]
    command += ["--max-seq-length", arguments.max_length] if arguments.max_length else []
    command += [arguments.teacher if option == TEACHER else option for option in options]
    subprocess.run([sys.executable, "-m", "vembed", *map(str, command)], check=True)


def _planted(rows: list[tuple[dict[str, Any], ...]], share: float) -> list[dict[str, Any]]:
    """Leave given negatives where the miner took them, until they are a share of all; a larger one holds a smaller one.

    Args:
        rows: Of each row what was mined without its given negatives, what was mined with them, and the row itself.
    """
    chosen = [apart for apart, _, _ in rows]
    found = [place for place, (_, together, row) in enumerate(rows) if {*together["negatives"]} & {*row["negatives"]}]
    random.Random(0).shuffle(found)
    wanted = round(share * sum(len(row["negatives"]) for row in chosen))
    for place in found:
        _, together, row = rows[place]
        wanted -= len({*together["negatives"]} & {*row["negatives"]})
        if wanted < 0:
            return chosen
        chosen[place] = together
    raise SystemExit(f"the miner takes too few given negatives to plant {share:.0%}")


def _halves(corpus: Path, split: str, output: Path) -> tuple[Path, Path]:
    """Write rows of an abstract's title and halves, and a test set of others, whose halves are both relevant."""
    rows, test = output / "halves.jsonl", output / "test"
    if not rows.exists():
        found = []
        for document in _read(corpus):
            sentences = re.split(r"(?<=[.!?])\s+", document["text"].strip())
            middle = len(sentences) // 2
            if document["title"].strip() and middle >= 2:
                found.append((document["title"], " ".join(sentences[:middle]), " ".join(sentences[middle:])))
        random.Random(0).shuffle(found)
        (test / "qrels").mkdir(parents=True, exist_ok=True)
        tested = list(enumerate(found[:TESTED]))
        _write(test / "queries.jsonl", ({"_id": f"q{n}", "text": title} for n, (title, *_) in tested))
        _write(
            test / "corpus.jsonl",
            ({"_id": f"{n}-{half}", "text": halves[half]} for n, (_, *halves) in tested for half in (0, 1)),
        )
        lines = [f"q{n}\t{n}-{half}\t1\n" for n, _ in tested for half in (0, 1)]
        (test / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), "utf-8")
        both = ({"query": title, "positive": half} for title, *halves in found[TESTED:][:TAUGHT] for half in halves)
        _write(output / "taught.jsonl", both)
        others = found[TESTED + TAUGHT :]
        _write(rows, ({"query": title, "positive": one, "negatives": [other]} for title, one, other in others))
    return rows, test


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    part = path.with_suffix(".part")
    part.write_text(text, "utf-8")
    part.rename(path)


def _train(
    arguments: argparse.Namespace, rows: Path, keys: dict[str, Any], seed: int, test: Path, folder: Path
) -> None:
    """Train with a recipe, evaluate, and keep the evaluation alone."""
    keys = {name: arguments.teacher if value == TEACHER else value for name, value in keys.items()}
    batch = keys.get("batch_size", arguments.batch_size)
    run = arguments.output / "run"
    vembed.train(
        {
            "model_name": arguments.model,
            "data_path": str(rows),
            "output_dir": str(run),
            **ONLY_TRAINS,
            "batch_size": batch,
            "max_steps": arguments.steps or arguments.pairs // batch,
            **_length(arguments),
            "learning_rate": arguments.learning_rate,
            "lr_scaling": "sqrt",
            "lr_reference_batch": arguments.batch_size,
            "temperature": 0.05,
            "teacher_cache": str(arguments.output / "teacher-cache") if "teacher_model_name" in keys else "auto",
            "seed": seed,
            **keys,
        }
    )
    _evaluate(arguments, str(run / "model"), test, folder)
    shutil.rmtree(run)


def _length(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"max_seq_length": arguments.max_length} if arguments.max_length else {}


def _evaluate(arguments: argparse.Namespace, model: str, test: Path, folder: Path) -> None:
    loaded = vembed.load(model, **_length(arguments))
    vembed.evaluate(loaded, test, split=arguments.split, output=folder)


def _table(untrained: EvaluationResult, found: dict[str, list[EvaluationResult]]) -> str:
    """Return the study as Markdown."""
    means = {name: mean_over_seeds(results, METRIC) for name, results in found.items()}
    baseline, *others = means
    corrected = holm([paired_p_value([(means[baseline], means[name])], METRIC) for name in others])
    p_values = dict(zip(others, corrected, strict=True))
    lines = [
        f"| | {METRIC}, mean | each seed | against {baseline}, 95% interval | p (Holm) | |",
        "|---|---|---|---|---|---|",
        f"| untrained | {untrained.metrics[METRIC]:.4f} | | | | |",
    ]
    for name, results in found.items():
        cells = [name, f"{means[name].metrics[METRIC]:.4f}", ", ".join(f"{one.metrics[METRIC]:.4f}" for one in results)]
        if name in p_values:
            judged = verdict(means[baseline], means[name], METRIC)
            pair = judged.comparison
            interval = f"{pair.difference:+.4f}, {pair.low:+.4f} to {pair.high:+.4f}"
            cells += [interval, f"{p_values[name]:.4f}", judged.word]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _regained(means: dict[str, float]) -> Iterator[str]:
    """Say how much of what planted answers cost each filter brings back."""
    for percent in PLANTED:
        plain, *filtered = (f"{percent}% planted{name}" for name in FILTERS)
        for name in filtered:
            if {"clean", plain, name} <= means.keys():
                lost, back = means["clean"] - means[plain], means[name] - means[plain]
                share = f", {back / lost:.0%}" if lost > 0 else ""
                yield f"{name}: {back:+.4f} of the {lost:.4f} that {plain} costs{share}"


if __name__ == "__main__":
    main()
