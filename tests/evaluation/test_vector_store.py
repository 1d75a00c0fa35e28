"""Vectors in blocks by content, which several runs may share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from vembed.distributed.ranks import Ranks
from vembed.evaluation.vector_store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def vectors_of(rows: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.stack([rows, rows + 1], axis=1).astype(np.float32)


def test_a_block_that_another_run_writes_again_can_be_read_all_the_while(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, "text-document", {"weights": "a"}, "vectors", "")
    ids = np.array([3, 5, 8])
    table = store.table(ids, 2, vectors_of, Ranks())
    (record,) = tmp_path.glob("*.json")
    seen = []

    def again() -> Iterator[NDArray[np.float32]]:
        for row in range(len(ids)):
            seen.append(store.table(ids, 2, lambda _: np.zeros((0, 2), dtype=np.float32), Ranks()).take(ids))
            yield vectors_of(np.array([row]))

    file = store.block(ids)
    content, reason = file.check({**store.key, "items": _items(record)}, rows=len(ids))
    assert content is not None, reason
    file.write(content["key"], (len(ids), 2), again(), lambda: {"ids": content["ids"]})
    assert len(seen) == len(ids)
    assert all(np.array_equal(each, table.take(ids)) for each in seen)


def _items(record: Path) -> str:
    items: str = json.loads(record.read_text("utf-8"))["key"]["items"]
    return items
