"""Mining: equal to looking at every document, whatever the blocks; killed anywhere, on ranks, the same; its report."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import faiss
import numpy as np
import pytest
import torch
from kit.pages import assert_sound
from mining_cases import made_rows, read_rows, reference, written

from vembed.api.model import load
from vembed.batch import Image, ImageLimits, content_id
from vembed.data.read import DataSource
from vembed.data.table_writer import RecordWriter
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, DataError, MachineError
from vembed.evaluation.mining_report import MiningReport, mining_page
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.pages.html import render_html
from vembed.vectors import mining as mine_module
from vembed.vectors import store as store_module
from vembed.vectors.encode import ItemEncoder
from vembed.vectors.items import corpus_items
from vembed.vectors.keys import MiningKeys
from vembed.vectors.mining import Miner, MiningTask, cross_encoder_teacher, encoder_teacher

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool

    from vembed.vectors.mining import Mined


SETTINGS = {
    "naive": {"mine_relative_margin": None},
    "margin": {"mine_negatives": 70, "mine_relative_margin": 0.4},
    "window": {"mine_range_min": 3, "mine_range_max": 20, "mine_relative_margin": None, "mine_negatives": 30},
    "scores": {
        "mine_relative_margin": None,
        "mine_absolute_margin": 0.1,
        "mine_min_score": 0.1,
        "mine_max_score": 0.4,
        "mine_negatives": 70,
    },
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("rows") / "rows.jsonl", made_rows(60))


@pytest.fixture(scope="module")
def task(rows: Path) -> MiningTask:
    return MiningTask.of(
        read_rows(rows).table, corpus_items([f"further document {n} of karan lobel" for n in range(20)])
    )


def pictures() -> MiningTask:
    writer = RecordWriter()
    writer.add("a text", positives=[Image("a picture", b"bytes")], file="f", line=1)
    return MiningTask.of(writer.finish())


@pytest.fixture(scope="module")
def encode(bag: Path) -> ItemEncoder:
    return load(bag).item_encoder(256)


def said(task: MiningTask, mined: Mined) -> list[list[tuple[str, int]]]:
    return [
        [(str(task.documents.take(np.array([row]))[0]), rank) for row, rank in zip(own, ranks, strict=True) if row >= 0]
        for own, ranks in zip(mined.rows_Un.tolist(), mined.ranks_Un.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_mined_is_what_looking_at_every_document_finds_whatever_the_blocks(
    name: str, task: MiningTask, encode: ItemEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = MiningKeys(**SETTINGS[name])
    expected = reference(task, encode, keys)
    assert name == "naive" or any(len(each) < keys.mine_negatives for each in expected)
    assert any(expected)
    assert said(task, Miner(encode, keys, tmp_path / "whole").mine(task)) == expected
    monkeypatch.setattr(mine_module, "BLOCK_QUERIES", 7)
    monkeypatch.setattr(store_module, "BLOCK_ROWS", 16)
    assert said(task, Miner(encode, keys, tmp_path / "cut").mine(task)) == expected
    assert len((tmp_path / "cut" / "document" / "blocks.jsonl").read_text().splitlines()) == 1 + 5


def test_a_document_that_answers_a_query_in_another_row_or_is_given_or_is_the_query_is_never_mined(
    rows: Path, encode: ItemEncoder, tmp_path: Path
) -> None:
    task = MiningTask.of(read_rows(rows).table)
    keys = MiningKeys(mine_relative_margin=None, mine_negatives=100)
    found = [{text for text, _ in own} for own in said(task, Miner(encode, keys, tmp_path).mine(task))]
    made = made_rows(60)
    of_record = task.query_of_record_N.tolist()
    assert of_record[0] == of_record[1]
    for number in (0, 1):
        assert not found[of_record[number]] & {made[0]["positive"], made[1]["positive"]}
    assert not found[of_record[4]] & set(made[4]["negatives"])
    assert made[7]["query"] not in found[of_record[7]]
    assert made[7]["query"] in found[of_record[8]]
    assert len(found[of_record[8]]) == len(task.documents) - 1, "all others may be"


def test_asking_for_more_negatives_than_the_window_holds_takes_no_more_memory(
    task: MiningTask, encode: ItemEncoder, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"mine_relative_margin": None, "mine_range_max": 20}
    whole = Miner(encode, MiningKeys(mine_negatives=20, **keys), tmp_path).mine(task)
    np.testing.assert_array_equal(
        Miner(encode, MiningKeys(mine_negatives=2**31 - 1, **keys), tmp_path).mine(task).rows_Un, whole.rows_Un
    )


def test_random_negatives_depend_on_seed_and_contents_alone(
    task: MiningTask, rows: Path, encode: ItemEncoder, tmp_path: Path
) -> None:
    keys = MiningKeys(mine_sampling="random", mine_relative_margin=None)
    one, other = (said(task, Miner(encode, keys, tmp_path, seed=seed).mine(task)) for seed in (1, 2))
    assert one != other
    assert one == said(task, Miner(encode, keys, tmp_path / "again", seed=1).mine(task))
    fewer = read_rows(rows).table.subset(np.arange(20, 60))
    part = MiningTask.of(fewer, corpus_items([f"further document {n} of karan lobel" for n in range(20)]))
    assert all([rank for _, rank in own] == sorted(rank for _, rank in own) for own in one)
    assert {rank for own in one for _, rank in own} > set(range(1, 50)), "they come from all over the window"
    assert said(part, Miner(encode, keys, tmp_path / "part", seed=1).mine(part)) != one[20:], "other documents, others"


def test_an_approximate_index_finds_what_it_finds_and_is_kept(
    task: MiningTask, encode: ItemEncoder, tmp_path: Path
) -> None:
    exact = Miner(encode, MiningKeys(), tmp_path).mine(task)
    whole = Miner(encode, MiningKeys(mine_index="IVF2,Flat:nprobe=2"), tmp_path).mine(task)
    np.testing.assert_array_equal(exact.rows_Un, whole.rows_Un)
    (index,) = tmp_path.glob("index-*.faiss")
    before = index.stat().st_mtime_ns
    half = MiningKeys(mine_index="IVF2,Flat:nprobe=2", mine_negatives=3)
    Miner(encode, half, tmp_path).mine(task)
    assert index.stat().st_mtime_ns == before
    for name, message in (("IFV2", "IFV2"), ("IVF512,Flat", "at least 512 documents, and there are 80")):
        with pytest.raises(ConfigError, match=message):
            Miner(encode, MiningKeys(mine_index=name), tmp_path / "new").mine(task)
    assert not (tmp_path / "new").exists(), "an index that can't be built costs no encoding"


@pytest.mark.parametrize("index", ["PQ8x4", "PCA16,Flat"])
def test_the_rules_compare_exact_scores_where_an_index_only_estimates_them(
    index: str, task: MiningTask, encode: ItemEncoder, tmp_path: Path
) -> None:
    mined = Miner(encode, MiningKeys(mine_index=index), tmp_path).mine(task)
    queries, documents = (np.load(tmp_path / side / "vectors.npy") for side in ("query", "document"))
    at, places = np.nonzero(mined.rows_Un >= 0)
    scores = np.einsum("pe,pe->p", queries[at], documents[mined.rows_Un[at, places]])
    np.testing.assert_allclose(mined.scores_Un[at, places], scores, atol=1e-6)
    assert (scores <= 0.95 * mined.positive_U[at] + 1e-6).all()
    assert (np.diff(np.nan_to_num(mined.scores_Un, nan=-2), axis=1) <= 0).all(), "nearest first"


class Killed(Exception):  # noqa: N818
    """Stands for the end of the process."""


def counted(append: Any, sizes: list[int]) -> Any:
    def counting(self: Any, vectors_BE: np.ndarray, **facts: Any) -> None:
        sizes.append(len(vectors_BE))
        append(self, vectors_BE, **facts)

    return counting


@pytest.mark.parametrize("after", [1, 4, 7, 11])
def test_a_rerun_goes_on_and_finds_the_same(
    after: int, task: MiningTask, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BLOCK_ROWS", 16)
    monkeypatch.setattr(mine_module, "BLOCK_QUERIES", 7)
    left = [10**6]

    def poll() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    encode = load(bag).item_encoder(256, poll=poll)
    whole = Miner(encode, MiningKeys(), tmp_path / "whole").mine(task)
    left[0] = after
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        Miner(encode, MiningKeys(), folder).mine(task)
    done = {path: path.stat().st_mtime_ns for path in folder.glob("**/*.npz")}
    whole_blocks = sum(len(path.read_bytes().splitlines()) - 1 for path in folder.glob("**/blocks.jsonl"))
    encoded: list[int] = []
    monkeypatch.setattr(store_module._Part, "append", counted(store_module._Part.append, encoded))
    left[0] = 10**6
    again = Miner(encode, MiningKeys(), folder).mine(task)
    for name, values in vars(whole).items():
        np.testing.assert_array_equal(vars(again)[name], values, err_msg=name)
    assert all(path.stat().st_mtime_ns == time for path, time in done.items()), "what was whole is not made again"
    num_blocks = sum(-(-len(items) // 16) for items in (task.queries, task.documents))
    assert len(encoded) == num_blocks - whole_blocks
    for side in ("query", "document"):
        vectors = (path / side / "vectors.npy" for path in (folder, tmp_path / "whole"))
        assert next(vectors).read_bytes() == next(vectors).read_bytes(), "and its bytes are the same"
    assert after < 2 or whole_blocks
    broken = sorted(folder.glob("chosen-*.npz"))[0]
    broken.write_bytes(broken.read_bytes()[:-40])
    Miner(encode, MiningKeys(), folder).mine(task)
    other = Miner(encode, MiningKeys(mine_negatives=2), folder).mine(task)
    assert other.rows_Un.shape[1] == 2, "other settings are mined anew, with the vectors that are there"


def test_a_changed_query_is_the_only_item_that_is_encoded_again(
    encode: ItemEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes, forward = made_rows(20), [], NgramBag.forward

    def counting(self: NgramBag, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(inputs["offsets"]))
        return forward(self, inputs)

    monkeypatch.setattr(NgramBag, "forward", counting)
    Miner(encode, MiningKeys(), tmp_path / "work").mine(
        MiningTask.of(DataSource(str(written(tmp_path / "a.jsonl", made)), "train").records().table)
    )
    assert sum(sizes) == 19 + 20, "two rows have one query; the negatives are other rows' documents"
    sizes.clear()
    made[10]["query"] += " anew"
    task = MiningTask.of(DataSource(str(written(tmp_path / "b.jsonl", made)), "train").records().table)
    again = Miner(encode, MiningKeys(), tmp_path / "work").mine(task)
    assert sum(sizes) == 1
    np.testing.assert_array_equal(again.rows_Un, Miner(encode, MiningKeys(), tmp_path / "new").mine(task).rows_Un)


def test_a_teacher_decides_what_the_margin_leaves_out(task: MiningTask, encode: ItemEncoder, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16))
    better = ItemEncoder(other, ChunkBudget(64, 10**6), torch.device("cpu"))
    teacher = encoder_teacher(better, task, tmp_path / "teacher")
    keys = MiningKeys(mine_relative_margin=0.3)
    mined = Miner(encode, keys, tmp_path, teacher=teacher).mine(task)
    alone = Miner(encode, keys, tmp_path).mine(task)
    assert (mined.rows_Un != alone.rows_Un).any()
    queries = better.table(task.queries.take(np.arange(len(task.queries))), "query")
    documents = better.table(task.documents.take(np.arange(len(task.documents))), "document")
    at, places = np.nonzero(mined.rows_Un >= 0)
    scores = np.einsum("pe,pe->p", queries[at], documents[mined.rows_Un[at, places]])
    np.testing.assert_allclose(mined.teacher_Un[at, places], scores, atol=1e-6)
    assert (scores <= 0.7 * mined.positive_U[at] + 1e-6).all()
    assert np.isnan(alone.teacher_Un).all()


def mine_on_ranks(rank: int, rows: Path, bag: Path, folder: Path) -> Any:
    with patch.object(mine_module, "BLOCK_QUERIES", 7), patch.object(store_module, "BLOCK_ROWS", 16):
        encode = load(bag).item_encoder(256)
        encode.ranks = Ranks.of_this_process()
        return Miner(encode, MiningKeys(), folder).mine(MiningTask.of(read_rows(rows).table))


def test_two_ranks_share_the_work_and_both_know_the_result(
    two_ranks: RankPool, rows: Path, bag: Path, encode: ItemEncoder, tmp_path: Path
) -> None:
    task = MiningTask.of(read_rows(rows).table)
    alone = Miner(encode, MiningKeys(), tmp_path / "alone").mine(task)
    for mined in two_ranks.run(mine_on_ranks, rows, bag, tmp_path / "shared"):
        np.testing.assert_array_equal(mined.rows_Un, alone.rows_Un)
        np.testing.assert_array_equal(mined.ranks_Un, alone.ranks_Un)
        np.testing.assert_allclose(mined.scores_Un, alone.scores_Un, atol=1e-6)


def mine_and_delete(rank: int, rows: Path, bag: Path, folder: Path) -> int:
    def late(path: Path) -> Mined | None:
        time.sleep(rank / 4)
        return read_block(path)

    read_block = mine_module._read
    with patch.object(mine_module, "_read", late):
        mined = mine_on_ranks(rank, rows, bag, folder)
    if rank == 0:
        shutil.rmtree(folder)
    return len(mined.rows_Un)


def test_the_first_rank_may_delete_the_folder_while_another_is_slow_to_read_it(
    two_ranks: RankPool, rows: Path, bag: Path, tmp_path: Path
) -> None:
    assert two_ranks.run(mine_and_delete, rows, bag, tmp_path / "shared") == [59, 59]


def test_what_the_model_can_not_encode_and_an_empty_window_are_refused(
    task: MiningTask, encode: ItemEncoder, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="pictures"):
        Miner(encode, MiningKeys(), tmp_path).mine(pictures())
    with pytest.raises(ConfigError, match="mine_range_min 100"):
        Miner(encode, MiningKeys(mine_range_min=100), tmp_path).mine(task)


@pytest.mark.parametrize(
    ("owner", "name", "error", "told"),
    [
        (mine_module.np, "savez", OSError(errno.ENOSPC, "full"), MachineError),
        (faiss, "write_index", RuntimeError(os.strerror(errno.ENOSPC)), MachineError),
        (mine_module, "search_index", OSError(errno.EIO, "broken"), OSError),
        (faiss, "read_index", OSError(errno.EACCES, "secret"), OSError),
        (ItemEncoder, "stream", FileNotFoundError(errno.ENOENT, "gone"), FileNotFoundError),
    ],
)
def test_only_what_can_not_be_written_is_told_so(
    owner: Any, name: str, error: Exception, told: type[Exception], task: MiningTask, encode: ItemEncoder,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(told) as caught:
        Miner(encode, MiningKeys(mine_index="IVF2,Flat"), tmp_path / "work").mine(task)
    assert isinstance(caught.value, MachineError) == (told is MachineError)
    assert (f"{tmp_path / 'work'} can't be written" in str(caught.value)) == (told is MachineError)


class Pairs:
    """A cross-encoder whose score is how much longer the document is."""

    name, modalities = "pairs", frozenset({"text"})

    def key(self) -> dict[str, str]:
        return {}

    def scores(self, pairs: list[tuple[str, str]]) -> torch.Tensor:
        return torch.tensor([len(document) - len(query) for query, document in pairs]) / 100


def test_a_cross_encoder_refuses_pictures_and_looks_alone_whether_it_is_to_stop(
    task: MiningTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks one may have more blocks of pairs: were it to ask the others, it would wait for ever."""
    monkeypatch.setattr(mine_module, "TEXTS_BLOCK", 4)
    model: Any = Pairs()
    rows_P, polls = np.arange(10), []
    for ranks, expected in ((Ranks(), 3), (Ranks(rank=0, world_size=2), 0)):
        polls.clear()
        teacher = cross_encoder_teacher(model, task, ranks=ranks, poll=lambda: polls.append(1))
        assert not polls
        assert (np.diff(teacher.scores(rows_P, rows_P)) != 0).any()
        assert len(polls) == expected
    with pytest.raises(DataError, match="pictures"):
        cross_encoder_teacher(model, pictures(), ranks=Ranks(), poll=lambda: None)


def test_equal_contents_are_one_document(tmp_path: Path) -> None:
    rows = [{"query": "one", "positive": "same text"}, {"query": "two", "positive": " same text "}]
    task = MiningTask.of(
        read_rows(written(tmp_path / "rows.jsonl", rows)).table, corpus_items(["same text", "", "new"])
    )
    assert len(task.documents) == 2, "and an empty document is none"
    assert task.documents.ids.tolist() == [content_id("same text"), content_id("new")]


def test_rows_of_classes_are_refused_as_classmates_answer_each_other(tmp_path: Path) -> None:
    rows = [{**row, "label": ["cat", "dog"][place % 2]} for place, row in enumerate(made_rows(8))]
    with pytest.raises(DataError, match="class"):
        MiningTask.of(read_rows(written(tmp_path / "rows.jsonl", rows)).table)


# --- the report: negatives near their positive are counted over all queries, and shown worst first


@pytest.fixture
def teacher() -> ItemEncoder:
    torch.manual_seed(5)
    other = NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16))
    return ItemEncoder(other, ChunkBudget(64, 10**6), torch.device("cpu"))


def mined(
    folder: Path, encode: ItemEncoder, teacher: ItemEncoder | None = None, *, command: str = "", **keys: Any
) -> MiningReport:
    rows = written(folder / "rows.jsonl", made_rows(60))
    task = MiningTask.of(read_rows(rows).table)
    judge = None if teacher is None else encoder_teacher(teacher, task, folder / "teacher")
    options = MiningKeys(**keys)
    found = Miner(encode, options, folder / "work", teacher=judge).mine(task)
    source = {"model": "m", **({} if teacher is None else {"teacher": "t"})}
    return MiningReport(task, found, options, source, (), {}, command)


@pytest.mark.parametrize("taught", [False, True])
def test_every_negative_near_its_positive_is_counted(
    encode: ItemEncoder, teacher: ItemEncoder, tmp_path: Path, taught: bool
) -> None:
    keys = {"mine_relative_margin": None, "mine_negatives": 6}
    report = mined(tmp_path, encode, teacher if taught else None, command="vembed mine", **keys)
    task, judge = report.task, teacher if taught else encode
    queries = judge.table(task.queries.take(np.arange(len(task.queries))), "query")
    documents = judge.table(task.documents.take(np.arange(len(task.documents))), "document")
    shares, worst = [], (-np.inf, "")
    for query, rows in enumerate(report.mined.rows_Un):
        positives = task.positives.take(np.array([query])).values
        scores = documents @ queries[query]
        best = positives[scores[positives].argmax()]
        for row in rows[rows >= 0]:
            shares.append(scores[row] / scores[best])
            lead = float(scores[row] - scores[best])
            worst = max(worst, (lead, str(task.documents.take(np.array([best]))[0])))
    page = mining_page(report, ImageLimits())
    document = page.document
    assert_sound(render_html(page))
    counts = [int((np.array(shares) > percent / 100).sum()) for percent in (90, 95, 100)]
    assert document["near_positives"] == [
        {"above_percent": percent, "negatives": count, "left_out_by": f"--relative-margin {margin}"}
        for percent, count, margin in zip((90, 95, 100), counts, ("0.1", "0.05", "0"), strict=True)
    ]
    assert counts[0] > counts[1] > counts[2] > 0
    assert document["examples"][0]["positive"] == worst[1], "the best positive of the query with the worst negative"
    leads = [
        max(each["score"] for each in example["negatives"]) - example["positive_score"]
        for example in document["examples"][:5]
    ]
    assert leads == sorted(leads, reverse=True)
    assert leads[0] == pytest.approx(worst[0], abs=1e-6)
    for count, percent in zip(counts, (90, 95, 100), strict=True):
        assert re.search(rf"\b{count}\b[^,.]* {percent}%", report.headline)
    assert ("by the teacher" in report.headline) == taught


@pytest.mark.parametrize("margin", [0.1, 0.05, 0.0])
def test_the_option_beside_a_count_leaves_those_out(encode: ItemEncoder, tmp_path: Path, margin: float) -> None:
    report = mined(tmp_path, encode, mine_relative_margin=margin, mine_negatives=6)
    document = mining_page(report, ImageLimits()).document
    (level,) = [
        each for each in document["near_positives"] if each["left_out_by"] == f"mine_relative_margin: {margin:g}"
    ]
    assert level["negatives"] == 0
    assert document["negatives"] > 0
