"""How near the estimate of false negatives of `vembed mine` comes to the truth, over many draws of planted answers.

Rows are a title and the two halves of its abstract, as `benchmarks/negatives.py planted` writes them to halves.jsonl.
A draw labels one half of each row by chance and leaves the other one to be mined in a share of the rows; in the others
it isn't there. The model then takes the nearest documents of each title, or the nearest below 95% of the labelled half.

    python benchmarks/planted_estimate.py --rows out/halves.jsonl --model MODEL --teacher TUNED
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import vembed
from vembed.mining.choose import choose
from vembed.mining.false_negatives import estimate
from vembed.vectors.keys import MiningKeys

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARES = {"all": 1.0, "a third": 1 / 3}
MARGINS = {"nearest": None, "below 95%": 0.05}
WINDOW = 100


def main() -> None:
    """Encode once, and print a line for each way to mine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="halves.jsonl")
    parser.add_argument("--model", required=True, help="mines, and scores where --teacher doesn't")
    parser.add_argument("--teacher", help="scores what the model finds")
    parser.add_argument("--queries", type=int, help="rows of a draw (default: all)")
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=64, help="in tokens")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.rows.read_text("utf-8").splitlines()]
    models = [arguments.model] + ([arguments.teacher] if arguments.teacher else [])
    encoded = [_encoded(model, rows, arguments.max_length) for model in models]
    print("| mined | other half | scores by | planted | estimated | error, mean and largest | within a fifth |")
    print("|---|---|---|---|---|---|---|")
    for mined, margin in MARGINS.items():
        for left, share in SHARES.items():
            for name, judge in zip(("the model", "the teacher"), encoded, strict=False):
                keys = MiningKeys(
                    mine_negatives=arguments.negatives, mine_range_max=WINDOW, mine_relative_margin=margin
                )
                found = np.array(
                    [
                        _draw(encoded[0], judge, share, keys, arguments.queries or len(rows), seed)
                        for seed in range(arguments.draws)
                    ]
                )
                errors = found[:, 1] / found[:, 0] - 1
                planted, estimated = (f"{100 * low:.1f} to {100 * high:.1f}%" for low, high in _ranges(found))
                largest = errors[np.abs(errors).argmax()]
                near = (np.abs(errors) <= 0.2).sum()
                cells = (mined, left, name, planted, estimated, f"{errors.mean():+.0%}, {largest:+.0%}")
                print(f"| {' | '.join(cells)} | {near} of {len(errors)} |", flush=True)


def _encoded(model: str, rows: list[dict[str, object]], max_length: int) -> tuple[NDArray[np.float32], ...]:
    """Return vectors of the titles, and of both halves of each."""
    loaded = vembed.load(model, max_seq_length=max_length)
    halves = [str(half) for row in rows for half in (row["positive"], *row["negatives"])]  # type: ignore[misc]
    titles = loaded.encode([str(row["query"]) for row in rows], "query")
    return titles, loaded.encode(halves, "document").reshape(len(rows), 2, -1)


def _draw(
    miner: tuple[NDArray[np.float32], ...],
    judge: tuple[NDArray[np.float32], ...],
    share: float,
    keys: MiningKeys,
    count: int,
    seed: int,
) -> tuple[float, float]:
    """Return the share of planted answers among the mined ones, and its estimate."""
    random = np.random.default_rng(seed)
    rows = random.permutation(len(miner[0]))[:count]
    labelled, kept = random.integers(0, 2, count), np.flatnonzero(random.random(count) < share)
    queries = np.arange(count)
    planted = np.full(count, -1)
    planted[kept] = count + np.arange(len(kept))

    def scores(encoded: tuple[NDArray[np.float32], ...]) -> NDArray[np.float32]:
        titles, halves = encoded[0][rows], encoded[1][rows]
        others = halves[kept, 1 - labelled[kept]]
        documents = np.concatenate([halves[queries, labelled], others])  # document n: the labelled half of row n
        return np.asarray(titles @ documents.T)

    found = scores(miner)
    judged = found if judge is miner else scores(judge)
    positive = judged[queries, queries].copy()
    found[queries, queries] = -np.inf
    window = np.argsort(-found, axis=1, kind="stable")[:, :WINDOW]
    judged = np.take_along_axis(judged, window, axis=1)
    places = choose(judged, positive, np.zeros(window.shape, np.uint64), keys).places_Bn
    chosen = np.zeros(window.shape, np.bool_)
    at, column = np.nonzero(places >= 0)
    chosen[at, places[at, column]] = True
    estimated = estimate(positive, judged, chosen)
    assert estimated is not None
    return float((window == planted[:, None])[chosen].mean()), estimated.rate


def _ranges(found: NDArray[np.float64]) -> list[tuple[float, float]]:
    return [(column.min(), column.max()) for column in found.T]


if __name__ == "__main__":
    main()
