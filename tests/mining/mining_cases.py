"""What the tests of mining share: rows whose queries share words with their documents, and a slow reference."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import content_id
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.data.table import LoadedRecords
    from vembed.vectors.encode import ItemEncoder
    from vembed.vectors.keys import MiningKeys
    from vembed.vectors.mining import MiningTask

WORDS = [
    f"{head}{tail}" for head in ("ka", "lo", "mi", "su", "te", "vo") for tail in ("ran", "bel", "dip", "gos", "nuk")
]


def made_rows(count: int) -> list[dict[str, Any]]:
    """Return rows whose query shares words with its positive, some queries and documents of which come back."""
    draw = random.Random(2)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        topic = draw.sample(WORDS, 4)
        rows.append({"query": " ".join(topic), "positive": " ".join([*topic, *draw.choices(WORDS, k=4), str(number)])})
    rows[1]["query"] = rows[0]["query"]  # one query with two positives, in two rows
    rows[2]["positive"] = [rows[2]["positive"], rows[3]["positive"]]
    rows[4]["negatives"] = [rows[5]["positive"]]
    rows[6]["positive"] = rows[7]["query"]  # a document that is another row's query
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read_rows(path: Path) -> LoadedRecords:
    return DataSource(str(path), "train", DataKeys(label_kind="class")).records()


def reference(task: MiningTask, encode: ItemEncoder, keys: MiningKeys) -> list[list[tuple[str, int]]]:
    """Return the negatives of each query with their ranks, by looking at all documents one by one."""
    documents = [str(item) for item in task.documents.take(np.arange(len(task.documents)))]
    queries = [str(item) for item in task.queries.take(np.arange(len(task.queries)))]
    vectors = encode.table(documents, "document").astype(np.float64)
    found = []
    for row, vector in enumerate(encode.table(queries, "query").astype(np.float64)):
        scores = vectors @ vector
        positives = set(task.positives.take(np.array([row])).values.tolist())
        known = positives | set(task.excluded.take(np.array([row])).values.tolist())
        assert positives
        best = max(scores[each] for each in positives)
        ranking = [each for each in np.argsort(-scores, kind="stable").tolist() if each not in known]
        window = list(enumerate(ranking, 1))[keys.mine_range_min : keys.mine_range_max]
        allowed = [
            (documents[each], rank)
            for rank, each in window
            if (keys.mine_relative_margin is None or scores[each] <= best - keys.mine_relative_margin * abs(best))
            and (keys.mine_absolute_margin is None or scores[each] <= best - keys.mine_absolute_margin)
            and (keys.mine_min_score is None or scores[each] >= keys.mine_min_score)
            and (keys.mine_max_score is None or scores[each] <= keys.mine_max_score)
        ]
        assert all(content_id(text) != content_id(queries[row]) for text, _ in allowed)
        found.append(allowed[: keys.mine_negatives])
    return found
