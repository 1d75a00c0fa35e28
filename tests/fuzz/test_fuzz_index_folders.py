"""However the folder of an index is bent, it is refused by folder, file and cure, or gives the hits that it gave."""

from __future__ import annotations

import os
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from folder_bends import Bend, ways
from fuzz_bytes import check_message
from fuzz_limits import within_limits

import vembed
from vembed.distributed.ranks import Ranks
from vembed.errors import VembedError
from vembed.vectors.encode import Encoded
from vembed.vectors.store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.workflows.search.index import Hit

KINDS = ("Flat", "HNSW8", "int8", "binary", "pictures")
BENDS = 60
"""Of each kind in the slow tests."""


@pytest.fixture(scope="module")
def made(bag: Path, clip: Path, balls: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build the index of a kind, once."""
    root = tmp_path_factory.mktemp("indexes")
    corpus = root / "corpus.txt"
    corpus.write_text("".join(f"document {number} of {number % 7} and {number % 5} things\n" for number in range(40)))

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            if kind == "pictures":
                vembed.build_index(clip, balls, folder)
            else:
                vembed.build_index(bag, corpus, folder, index=kind)
        return folder

    return make


def answers(folder: Path) -> tuple[list[list[Hit]], list[bytes], list[list[float]]]:
    """Return all that an index is asked for: hits, thumbnails and vectors."""
    searcher = vembed.open_index(folder)
    rows = range(len(searcher))
    hits = searcher.search(["2 things", "document 3"], k=len(searcher))
    index = searcher.index
    return hits, [index.thumbnail(row) for row in rows], [index.vector(row).tolist() for row in rows]


def check(bend: Bend, whole: Path, bent: Path, wanted: object) -> str:
    """Open a bent copy of an index; return what came of it."""
    folder = bend.copy(whole, bent)
    error = None
    with within_limits():
        try:
            given = answers(folder)
        except VembedError as caught:
            error = caught
    if error is None:
        assert given == wanted, "other answers"
        return "equal"
    check_message(error)
    message = str(error)
    assert error.exit_code == 2, message
    assert str(folder) in message, message
    assert Path(bend.file).name in message, message
    cures = ("encode the corpus again", "make one with vembed.build_index", "make an index with vembed.build_index")
    assert any(cure in message for cure in cures), message
    return "refused"


def test_a_few_bent_folders(made: Callable[[str], Path], tmp_path: Path) -> None:
    for kind in ("Flat", "pictures"):
        whole = made(kind)
        wanted = answers(whole)
        came = [check(bend, whole, tmp_path / "bent", wanted) for bend in islice(ways(whole), 40)]
        # The file of checksums may be missing, and blanks in it turned over.
        assert came.count("refused") >= 36


def test_a_description_that_nests_deeper_than_python_reads_is_refused(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = made("Flat")
    bend = Bend("meta.json", "nested deeply", lambda path: path.write_bytes(b"[" * 100_000))
    assert check(bend, whole, tmp_path / "bent", answers(whole)) == "refused"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_bent_in_many_ways(made: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    whole = made(kind)
    wanted, seed = answers(whole), int(os.environ.get("VEMBED_FUZZ_SEED", "0"))
    came = [check(bend, whole, tmp_path / "bent", wanted) for bend in islice(ways(whole, seed), BENDS)]
    assert came.count("refused") > 0.8 * BENDS


def test_an_index_without_checksums_is_refused_or_searched(made: Callable[[str], Path], tmp_path: Path) -> None:
    """An index of an older version: what its numbers say goes unnoticed, and what can't be read is told in words."""
    old = tmp_path / "old"
    shutil.copytree(made("pictures"), old)
    (old / "checksums.json").unlink()
    for bend in islice(ways(old), 60):
        folder, message = bend.copy(old, tmp_path / "bent"), ""
        with within_limits():
            try:
                answers(folder)
            except VembedError as error:
                message = str(error)
        assert not message or str(folder) in message, message


class Numbers:
    """Items that are their own content."""

    ids = np.arange(40, dtype=np.int64)

    def take(self, rows: NDArray[np.int64]) -> list[int]:
        return self.ids[rows].tolist()


def test_a_bent_store_gives_its_vectors_all_the_same(tmp_path: Path) -> None:
    def encode(lists: Iterable[Sequence[int]]) -> Iterator[Encoded]:
        for numbers in lists:
            yield Encoded(np.repeat(np.array(numbers, dtype=np.float32)[:, None], 3, axis=1), 0)

    def get(folder: Path) -> NDArray[np.float32]:
        return VectorStore(folder, "set", {"model": "a"}, "vectors", "choose another").get(Numbers(), encode, Ranks())

    wanted = np.array(get(tmp_path / "whole"))
    assert wanted[39].tolist() == [39.0] * 3
    for bend in islice(ways(tmp_path / "whole"), 120):
        folder = bend.copy(tmp_path / "whole", tmp_path / "bent")
        with within_limits():
            np.testing.assert_array_equal(get(folder), wanted, err_msg=str(bend))
