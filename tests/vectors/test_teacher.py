"""A teacher: asked once, read from disk ever after, the same for any number of ranks, and never when it isn't true."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.text_models import write_cross_encoder

from vembed.batch import Augmentation, ImageLimits
from vembed.data.collate import collate
from vembed.data.read import DataSource
from vembed.data.sampler import GlobalSampler
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.base import BatchStructure, ContrastiveLoss
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.plan.devices import Devices
from vembed.training.batches import BatchSource, pools_of
from vembed.vectors import store as vector_store
from vembed.vectors import teacher as teaching
from vembed.vectors.encode import ItemEncoder
from vembed.vectors.items import distinct_items
from vembed.vectors.teacher import Answers, PairTeacher, Teacher, TeacherUse, find_teacher

if TYPE_CHECKING:
    from kit.ranks import RankPool

    from vembed.batch import ContrastiveBatch
    from vembed.data.table import RecordTable


CPU = torch.device("cpu")


NUM_ROWS, BATCH, DIMENSION = 12, 4, 8


WORDS = [f"w{number}" for number in range(3 * NUM_ROWS)]


BOTH = TeacherUse(vectors=True, scores=True)


def write_data(folder: Path) -> Path:
    """Write rows with 0 to 2 negatives; two queries and some documents repeat."""
    rows = [
        {
            "query": f"w{row % (NUM_ROWS - 2)}",
            "positive": f"w{row} w{row + NUM_ROWS}",
            "negatives": [
                f"w{(row + step) % NUM_ROWS} w{row + step + 2 * NUM_ROWS - 4}" for step in range(1, 1 + row % 3)
            ],
        }
        for row in range(NUM_ROWS)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records_in(folder: Path) -> RecordTable:
    return DataSource(str(folder / "rows.jsonl"), "train").records().table


def write_bag(folder: Path, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    NgramBag(NgramBagConfig(dimension=DIMENSION, buckets=64)).save(folder)
    return folder


def find(folder: Path, name: str = "bag", *, use: TeacherUse = BOTH, kept: str = "kept") -> Teacher:
    devices = Devices("CPU", 1, 1 << 30, 0.1, 10.0)
    keys = ModelKeys(model_name=str(folder / name))
    return find_teacher(keys, records_in(folder), use, folder / kept, limits=ImageLimits(), devices=devices)


def asking(ranks: Ranks | None = None) -> tuple[Any, ...]:
    return CPU, ranks or Ranks(), None, lambda: None


def filled(folder: Path, answers: Answers) -> ContrastiveBatch:
    """Return a batch of all records in another order, filled."""
    rows = [7, 3, 11, 0, 1, 2, 4, 5, 6, 8, 9, 10]
    records = records_in(folder).take(rows)
    counts = [len(record.positives) + len(record.negatives) for record in records]
    return answers(collate(records, rows), np.array(counts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    write_bag(tmp_path / "bag")
    return tmp_path


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts, stream = [], ItemEncoder.stream

    def counted(self: ItemEncoder, lists: Any, side: Any) -> Any:
        def seen() -> Any:
            for items in lists:
                counts.append(len(items))
                yield items

        yield from stream(self, seen(), side)

    monkeypatch.setattr(ItemEncoder, "stream", counted)
    return counts


def test_a_batch_gets_unit_vectors_of_its_items_and_scores_of_each_rows_own_documents(folder: Path) -> None:
    batch = filled(folder, find(folder).answers(*asking()))
    encode = ItemEncoder(load_encoder(ModelKeys(model_name=str(folder / "bag"))), ChunkBudget(3, 10**6), CPU)
    for items, side, found in (
        (batch.queries, "query", batch.teacher_Q),
        (batch.documents, "document", batch.teacher_D),
    ):
        vectors = encode.table(items, side)
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)
    assert batch.teacher_Q is not None
    assert batch.teacher_D is not None
    assert batch.listed_P2 is not None
    own = {*map(tuple, batch.positives_P2.tolist()), *map(tuple, batch.negatives_P2.tolist())}
    assert {*map(tuple, batch.listed_P2.tolist())} == own
    scores_QD = batch.teacher_Q.astype(np.float64) @ batch.teacher_D.T.astype(np.float64)
    np.testing.assert_allclose(batch.listed_scores_P, scores_QD[tuple(batch.listed_P2.T)], atol=1e-6)
    only = filled(folder, find(folder, use=TeacherUse(vectors=True, scores=False)).answers(*asking()))
    assert (only.listed_P2, only.teacher_Q is None) == (None, False)


def test_it_is_asked_once_and_another_teacher_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_encoded(monkeypatch)
    first = filled(folder, find(folder).answers(*asking()))
    distinct = {record.query for record in records_in(folder)}
    assert counts[0] == len(distinct) < NUM_ROWS, "an item that repeats is encoded once"
    counts.clear()
    again = filled(folder, find(folder).answers(*asking()))
    assert counts == []
    assert np.array_equal(first.teacher_D, again.teacher_D)
    write_bag(folder / "bag", seed=1)
    other = filled(folder, find(folder).answers(*asking()))
    assert sum(counts) > 0
    assert not np.allclose(first.teacher_D, other.teacher_D)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bag", "judge"])
def test_its_identity_tells_another_teacher_apart_and_reads_the_weights_once(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def counted(keys: ModelKeys, load: Any = load_encoder, **more: Any) -> Any:
        loaded.append(keys.model_name if more.get("with_weights", True) else "")
        return load(keys, **more)

    monkeypatch.setattr(teaching, "load_encoder", counted)
    write_cross_encoder(folder / "judge", WORDS)
    use = TeacherUse(vectors=False, scores=True)
    teacher = find(folder, name, use=use)
    identity = teacher.identity(Ranks(), None)
    assert {"weights", "encoder", "preprocessing", "precision"} == identity.keys()
    teacher.answers(*asking())
    assert teacher.identity(Ranks(), None) == identity == find(folder, name, use=use).identity(Ranks(), None)
    assert loaded.count(str(folder / "bag")) == 2 * (name == "bag")
    assert find(folder, name, use=use).identity(Ranks(), torch.bfloat16)["precision"] == "torch.bfloat16"
    write_bag(folder / "bag", seed=1)
    write_cross_encoder(folder / "judge", WORDS[:-1])
    assert find(folder, name, use=use).identity(Ranks(), None)["weights"] != identity["weights"]


def test_a_killed_process_goes_on_behind_its_last_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_store, "BLOCK_ROWS", 3)
    whole = filled(folder, find(folder, kept="whole").answers(*asking()))
    counts = count_encoded(monkeypatch)
    child = os.fork()
    if child == 0:  # killed while it has vectors of the third block in hand
        stream = ItemEncoder.stream

        def dies(self: ItemEncoder, lists: Any, side: Any) -> Any:
            for number, encoded in enumerate(stream(self, lists, side)):
                if number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield encoded

        ItemEncoder.stream = dies  # type: ignore[method-assign]
        find(folder).answers(*asking())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    resumed = filled(folder, find(folder).answers(*asking()))
    num_left, counts[:] = sum(counts), []
    find(folder, kept="third").answers(*asking())
    assert num_left == sum(counts) - 2 * 3
    for name in ("teacher_Q", "teacher_D", "listed_scores_P"):
        assert np.array_equal(getattr(resumed, name), getattr(whole, name)), name


def test_the_plan_says_what_asking_costs(folder: Path) -> None:
    teacher = find(folder)
    counts = [len({record.query for record in records_in(folder)})]
    counts += [len({item for record in records_in(folder) for item in (*record.positives, *record.negatives)})]
    assert f"{counts[0]} texts (query) and {counts[1]} texts (document) once, before step 1" in teacher.note
    assert teacher.num_bytes == 4 * DIMENSION * sum(counts)
    assert not (folder / "kept").exists(), "nothing is asked for a plan"
    teacher.answers(*asking())
    stored = sum(path.stat().st_size for path in (folder / "kept").glob("*/vectors.npy"))
    assert teacher.num_bytes < stored < teacher.num_bytes + 2 * 200


class Taught(ContrastiveLoss):
    """All similarities are to be the teacher's, and those of listed pairs twice."""

    def forward(self, q_QE: torch.Tensor, d_DE: torch.Tensor, structure: BatchStructure) -> torch.Tensor:
        assert structure.teacher_Q is not None
        assert structure.teacher_D is not None
        wrong_QD = q_QE @ d_DE.T - structure.teacher_Q @ structure.teacher_D.T
        if structure.listed_P2 is None:
            return wrong_QD.square().mean()
        cells = (q_QE @ d_DE.T)[structure.listed_P2.unbind(1)]
        return wrong_QD.square().mean() + (cells - structure.listed_scores_P.to(cells.dtype)).square().mean()


def trajectory(folder: Path, answers: Answers, ranks: Ranks, *, first: int = 0, last: int = 6) -> list[float]:
    """Train by plain gradient descent, and return the losses of the steps from `first` on."""
    torch.manual_seed(2)
    student = NgramBag(NgramBagConfig(dimension=DIMENSION, buckets=64)).double().train()
    records = records_in(folder)
    source = BatchSource(
        records, GlobalSampler(len(records), batch_size=BATCH, seed=3), student, CPU,
        Augmentation("none", flip=False, seed=0), rank=ranks.rank, world_size=ranks.world_size, answers=answers,
    )  # fmt: skip
    parameters = list(student.parameters())
    engine = GradCacheEngine(Taught(), EngineOptions(ChunkBudget(3, 10**6), CPU, ranks=ranks), parameters)
    losses = []
    for step in range(last):
        batch = source.batch(step)
        losses.append(engine.step(pools_of(batch, student), batch.structure, assignment=batch.assignment).loss)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return losses[first:]


def on_rank(rank: int, folder: str, kept: str) -> tuple[list[float], int]:
    """Return the trajectory of both ranks, and how many items this one encoded."""
    ranks, counts, share = Ranks.of_this_process(), [], ItemEncoder._encode_share

    def counted(self: ItemEncoder, features: Any, own: Any) -> Any:
        counts.append(len(own))
        return share(self, features, own)

    ItemEncoder._encode_share = counted  # type: ignore[method-assign]
    try:
        answers = find(Path(folder), kept=kept).answers(*asking(ranks))
    finally:
        ItemEncoder._encode_share = share  # type: ignore[method-assign]
    return trajectory(Path(folder), answers, ranks), sum(counts)


def test_two_processes_share_the_asking_and_train_as_one_does(two_ranks: RankPool, folder: Path) -> None:
    alone = trajectory(folder, find(folder).answers(*asking()), Ranks())
    assert alone[-1] < 0.8 * alone[0], "it learns, or there is nothing to compare"
    (first, first_count), (second, second_count) = two_ranks.run(on_rank, str(folder), "kept")
    assert (first_count, second_count) == (0, 0), "what one process asked two need not ask"
    assert first == pytest.approx(alone, rel=1e-10)
    assert second == pytest.approx(alone, rel=1e-10)
    (shared, first_count), (_, second_count) = two_ranks.run(on_rank, str(folder), "theirs")
    num_items = sum(len(side) for side in distinct_items(records_in(folder)))
    assert first_count + second_count == num_items, "every item is encoded once, by one of the two"
    assert abs(first_count - second_count) <= 2, "by turns, at any speed: they differ by one of each side at most"
    assert shared == pytest.approx(alone, rel=1e-6)


def test_what_a_cross_encoder_said_of_a_pair_is_what_the_library_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import CrossEncoder as Library

    write_cross_encoder(folder / "judge", WORDS)
    use = TeacherUse(vectors=False, scores=True)
    teacher = find(folder, "judge", use=use)
    assert isinstance(teacher, PairTeacher)
    batch = filled(folder, teacher.answers(*asking()))
    assert batch.listed_P2 is not None
    assert batch.teacher_Q is None
    pairs = [[batch.queries[row], batch.documents[place]] for row, place in batch.listed_P2.tolist()]
    assert f"scores {len({tuple(pair) for pair in pairs})} pairs" in teacher.note
    library = Library(str(folder / "judge"), device="cpu")
    expected = library.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    assert np.ptp(expected) > 0.1, "scores differ"
    np.testing.assert_allclose(batch.listed_scores_P, expected, atol=1e-6)
    monkeypatch.setattr(Library, "predict", lambda *_, **__: pytest.fail("it was asked again"))
    again = filled(folder, find(folder, "judge", use=use).answers(*asking()))
    assert np.array_equal(again.listed_scores_P, batch.listed_scores_P)


def judged_on(rank: int, folder: str) -> np.ndarray:
    teacher = find(Path(folder), "judge", use=TeacherUse(vectors=False, scores=True), kept="by two")
    scores_P = filled(Path(folder), teacher.answers(*asking(Ranks.of_this_process()))).listed_scores_P
    assert scores_P is not None
    return scores_P


@pytest.mark.slow
def test_two_processes_share_the_pairs_of_a_cross_encoder(two_ranks: RankPool, folder: Path) -> None:
    write_cross_encoder(folder / "judge", WORDS)
    teacher = find(folder, "judge", use=TeacherUse(vectors=False, scores=True))
    alone = filled(folder, teacher.answers(*asking())).listed_scores_P
    for scores_P in two_ranks.run(judged_on, str(folder)):
        np.testing.assert_allclose(scores_P, alone, atol=1e-6)


def test_a_teacher_that_cannot_say_what_is_read_is_refused_before_it_is_asked(folder: Path) -> None:
    write_cross_encoder(folder / "judge", WORDS)
    with pytest.raises(ConfigError, match="vectors"):
        find(folder, "judge")
    with pytest.raises(ConfigError, match="from -1 to 1"):
        find(folder, "judge", use=TeacherUse(vectors=False, scores=True, score_bounds=(-1, 1)))
    rows = [{"query_image": "red.png", "positive": "a"}, {"query_image": "red.png", "positive": "b"}]
    PIL.Image.new("RGB", (9, 9), (255, 0, 0)).save(folder / "red.png")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="pictures"):
        find(folder)
    with pytest.raises(ConfigError, match="texts"):
        find(folder, "judge", use=TeacherUse(vectors=False, scores=True))
