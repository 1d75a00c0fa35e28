"""Batches made ahead by workers: the same ones, whatever becomes of the workers."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import PIL.Image
import pytest
import torch
from kit.runs import metric_rows
from kit.runs import write_rows as write_lines
from kit.text_models import write_model
from torch.utils.data import dataloader

import vembed.training.batches as made
import vembed.training.loading as room
from vembed.batch import Augmentation, Image
from vembed.config.schema import Config
from vembed.data.images import ImageError
from vembed.data.read import DataSource
from vembed.data.sampler import GlobalSampler
from vembed.errors import DataError, MachineError
from vembed.losses.base import BatchStructure
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.training.batches import BatchSource, pools_of
from vembed.training.loading import BatchLoader
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from vembed.training.batches import FeaturedBatch

pytestmark = pytest.mark.usefixtures("undrawn")

NUM_RECORDS, BATCH, STEPS_PER_EPOCH = 10, 4, 3


def drawn(number: int) -> bytes:
    """Return a picture of noise: every pixel shows whether it was moved."""
    pixels = np.random.default_rng(number).integers(0, 256, (20, 16 + number, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_rows(folder: Path) -> Path:
    """Write captions with a picture each, and some with a second one as a hard negative."""
    for number in range(NUM_RECORDS):
        (folder / f"{number}.png").write_bytes(drawn(number))
    rows: list[Any] = [{"query": f"noise {number}", "positive_image": f"{number}.png"} for number in range(NUM_RECORDS)]
    rows[3]["negative_images"] = ["5.png", "6.png"]
    return write_lines(folder / "rows.jsonl", rows)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


def source_of(
    rows: Path, model: str = "builtin:tiny-clip", *, augmentation: Augmentation | None = None, kind: Any = BatchSource
) -> BatchSource:
    torch.manual_seed(1)
    records = DataSource(str(rows), "train").records().table
    encoder = load_encoder(ModelKeys(model_name=model), ["noise"])
    sampler = GlobalSampler(len(records), batch_size=BATCH, seed=3)
    assert sampler.batches_per_epoch == STEPS_PER_EPOCH
    changes = Augmentation("strong", flip=True, seed=3) if augmentation is None else augmentation
    source: BatchSource = kind(records, sampler, encoder, torch.device("cpu"), changes, counts_masked=True)
    return source


def loader_of(source: BatchSource, num_workers: int, *, num_steps: int = 9) -> BatchLoader:
    return BatchLoader(source, num_workers=num_workers, batches_ahead=2 * num_workers, num_batches=num_steps)


def numbers_of(batch: FeaturedBatch) -> dict[str, bytes]:
    """Return every number of a batch."""
    arrays: dict[str, Any] = {
        "positives": batch.structure.positives_P2.numpy(),
        "queries": batch.structure.query_ids_Q.numpy(),
        "documents": batch.structure.document_ids_D.numpy(),
        "records": np.array(batch.record_ids),
        "masked": np.array(batch.num_masked),
        "truncated": np.array(batch.num_truncated),
    }
    for place, (features, slots) in enumerate(batch.parts):
        arrays |= {f"{place} slots": slots, f"{place} lengths": features.lengths}
        arrays |= {f"{place} {name}": values for name, values in features.per_row.items()}
        for name, column in features.columns.items():
            arrays |= {f"{place} {name} values": column.values, f"{place} {name} offsets": column.offsets}
    return {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("shares", [True, False], ids=["shared memory", "pipe"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_of_workers_equal_those_of_this_process_bit_for_bit(
    rows: Path, num_workers: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shares:
        monkeypatch.setattr(room, "_free_shared_memory", lambda: 0)
    source = source_of(rows)
    expected = [numbers_of(source.batch(step)) for step in range(9)]
    assert len({one["1 pixels"] if "1 pixels" in one else one["0 pixels"] for one in expected}) == 9
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())
    for first in (0, 5):  # a run that starts, and one that is resumed in the middle of an epoch
        with loader_of(source, num_workers) as loader:
            for step in range(first, 9):
                batch = loader.batch(step)
                assert numbers_of(batch) == expected[step], step
                assert all(pool.encode is source.encoder for pool in pools_of(batch, source.encoder))
    assert torch.equal(torch.get_rng_state(), before), "the generators of this process are not touched"
    assert repr(np.random.get_state()) == numpy_before


@pytest.mark.parametrize("model", ["builtin:ngram-bag", "bert"])
def test_texts_are_tokenized_ahead_as_well(tmp_path: Path, model: str) -> None:
    texts = [{"query": f"a {number}", "positive": f"b {number}"} for number in range(NUM_RECORDS)]
    path = write_lines(tmp_path / "texts.jsonl", texts)
    source = source_of(path, str(write_model(tmp_path / "bert", "bert")) if model == "bert" else model)
    if model == "bert":
        assert source.encoder.tokenizer.is_fast  # type: ignore[union-attr]
        source.encoder.featurize(["a b c"] * 4000, "query")  # by as many threads as there are cores
    with loader_of(source, 2) as loader:
        for step in range(4):
            assert numbers_of(loader.batch(step)) == numbers_of(source.batch(step))


def test_this_process_neither_deals_rows_nor_counts_nor_tokenizes(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, source = os.getpid(), source_of(rows)
    expected = numbers_of(source.batch(0))
    work: list[tuple[Any, str]] = [(made, name) for name in ("collate", "assign_rows", "count_masked")]
    for owner, name in (*work, (BatchStructure, "of"), (type(source.encoder), "featurize")):
        original = getattr(owner, name)

        def elsewhere(*args: Any, original: Any = original, name: str = name, **keys: Any) -> Any:
            assert os.getpid() != here, name
            return original(*args, **keys)

        monkeypatch.setattr(owner, name, elsewhere)
    with loader_of(source, 1) as loader:
        assert numbers_of(loader.batch(0)) == expected
    with pytest.raises(AssertionError, match="collate"):
        source.batch(0)


def test_batches_come_in_order_or_not_at_all(rows: Path) -> None:
    with loader_of(source_of(rows), 1) as loader:
        loader.batch(2)
        with pytest.raises(ValueError, match="batch 5 is asked for, and batch 3 comes next"):
            loader.batch(5)
        loader.batch(3)


class Spy(BatchSource):
    """Tells what a worker finds, in the place of a batch."""

    __slots__ = ()

    def batch(self, step: int) -> Any:
        assert os.getppid() == self.accumulated, "the parent's process id"
        facts = {
            "threads": torch.get_num_threads(),
            "weights": sum(tensor.numel() for tensor in (*self.encoder.parameters(), *self.encoder.buffers())),
            "ignored": [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)],
            "tokenizers": os.environ["TOKENIZERS_PARALLELISM"],
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        raise DataError(json.dumps(facts))


def test_a_worker_has_one_thread_and_no_weights_and_leaves_signals_to_its_parent(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    spy = replace(source_of(rows, kind=Spy), accumulated=os.getpid())
    num_weights = sum(parameter.numel() for parameter in spy.encoder.parameters())
    with pytest.raises(DataError) as caught, loader_of(spy, 1) as loader:
        loader.batch(0)
    expected = {"threads": 1, "weights": 0, "ignored": [True, True], "tokenizers": "false", "blocked": []}
    assert json.loads(str(caught.value)) == expected
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert num_weights == sum(parameter.numel() for parameter in spy.encoder.parameters()) > 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_picture_that_vanished_is_the_error_that_it_is_without_workers(rows: Path) -> None:
    source = source_of(rows)
    for step in range(3):  # the identities of the pictures are known by now, as they are in a run
        source.batch(step)
    wanted = source.records.take(source.sampler.rows(1).tolist())
    for name in {image.path for record in wanted for image in record.positives if isinstance(image, Image)}:
        Path(name).unlink()
    source.encoder._pixels.clear()  # type: ignore[operator,union-attr]
    with pytest.raises(ImageError, match=r"\.png: no such file") as here:
        source.batch(1)
    with loader_of(source, 2) as loader:
        loader.batch(0)
        with pytest.raises(ImageError) as there:
            loader.batch(1)
        assert str(there.value) == str(here.value)
    assert pickle.loads(pickle.dumps(here.value)).reason == here.value.reason


class Broken(BatchSource):
    """Has a bug."""

    __slots__ = ()

    def batch(self, step: int) -> Any:
        raise KeyError("a bug of ours")


def test_a_bug_in_a_worker_keeps_its_traceback(rows: Path) -> None:
    with pytest.raises(KeyError, match=r"(?s)DataLoader worker process 0.*in batch.*a bug of ours"):  # noqa: SIM117
        with loader_of(source_of(rows, kind=Broken), 1) as loader:
            loader.batch(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_an_error_that_says_so_soon(rows: Path, number: signal.Signals) -> None:
    started = time.monotonic()
    workers = []

    def go_on() -> None:
        with loader_of(source_of(rows), 2, num_steps=10_000) as loader:
            loader.batch(0)
            workers.extend(loader._workers)
            os.kill(workers[1].pid or 0, number)
            for step in range(1, 10_000):
                loader.batch(step)

    with pytest.raises(MachineError, match=f"killed by {number.name}.*same command continues") as caught:
        go_on()
    assert time.monotonic() - started < 60
    assert f"process {workers[1].pid}" in str(caught.value)
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_the_others_start_is_the_same_error(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_index = dataloader._MultiProcessingDataLoaderIter._try_put_index

    def put_behind_a_death(iterator: Any) -> None:
        if iterator._workers[0].is_alive():
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            time.sleep(0.5)
        put_index(iterator)

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_try_put_index", put_behind_a_death)
    monkeypatch.setattr(dataloader._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    with pytest.raises(MachineError, match="killed by SIGKILL"), loader_of(source_of(rows), 2) as loader:
        loader.batch(0)


def test_signals_for_all_do_not_end_a_worker(rows: Path) -> None:
    with loader_of(source_of(rows), 2) as loader:
        loader.batch(0)
        for worker in loader._workers:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(worker.pid or 0, number)
        for step in range(1, 9):
            loader.batch(step)


@pytest.mark.slow
def test_leaving_ends_the_workers_whatever_was_raised(rows: Path) -> None:
    source = source_of(rows)
    for error in (KeyboardInterrupt, MachineError, None):
        try:
            with loader_of(source, 2, num_steps=1000) as loader:
                loader.batch(0)
                workers = loader._workers
                assert len(workers) == 2
                assert all(worker.is_alive() for worker in workers)
                if error is not None:
                    raise error
        except (KeyboardInterrupt, MachineError):
            pass
        assert not any(worker.is_alive() for worker in workers)
    gc.collect()  # what torch does when the iterator goes


class Slow(BatchSource):
    """Never gets ready."""

    __slots__ = ()

    def batch(self, step: int) -> Any:
        if step:
            time.sleep(600)
        return BatchSource.batch(self, step)


def test_a_worker_that_is_at_something_long_is_not_waited_for(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CLOSE_SECONDS", 0.5)
    with loader_of(source_of(rows, kind=Slow), 2) as loader:
        loader.batch(0)
        workers = loader._workers
        started = time.monotonic()
    assert time.monotonic() - started < 20
    assert not any(worker.is_alive() for worker in workers)


def test_blocks_of_batches_that_differ_a_little_are_of_one_size_and_none_is_an_eighth_too_large() -> None:
    assert len({room.block_bytes(540_000_000 + 150_528 * more) for more in range(40)}) == 1
    for num_bytes in (100_000, 1 << 20, (1 << 20) + 1, 616_562_688, (1 << 30) - 1):
        assert num_bytes <= room.block_bytes(num_bytes) <= num_bytes * 1.125


def test_arrays_come_in_one_block_that_is_pinned_and_no_chunk_of_pictures_is_copied(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and encoded pictures stay in the worker, so that what is pickled beside the block is small."""
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.shape)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)  # no accelerator is needed to see what is pinned
    source = source_of(rows)
    for free in (0, 1 << 40):
        monkeypatch.setattr(room, "_free_shared_memory", lambda free=free: free)
        parcel = room._Parcel.of(source.batch(0), 1)
        assert isinstance(parcel.block, torch.Tensor) == (free > 0)
        assert b"noise" not in parcel.rest
        assert b".png" not in parcel.rest
        assert len(parcel.rest) < 6000
        block = np.asarray(parcel.block)
        arrays = [values for features, _ in parcel.unpacked().parts for values in features.per_row.values()]
        assert arrays
        assert all(np.shares_memory(array, block) and array.flags.writeable for array in arrays)
        parcel = parcel.pin_memory()
        assert numbers_of(parcel.unpacked()) == numbers_of(source.batch(0))
    assert len(pinned) == 2, "one block each"
    pool = next(pool for pool in pools_of(parcel.unpacked(), source.encoder) if pool.features.per_row)
    pixels = pool.features.per_row["pixels"]
    assert len(pixels) >= 4

    for chunk, is_shared in (([1, 2, 3], True), ([2], True), ([2, 1], False), ([0, 2], False)):
        collated = pool.collate(pool.features, np.array(chunk), 1)["pixels"].numpy()
        assert np.array_equal(collated, pixels[chunk])
        assert np.shares_memory(collated, pixels) == is_shared


def test_what_a_picture_takes_is_what_the_encoder_makes_of_it(rows: Path) -> None:
    encoder = source_of(rows).encoder
    features = encoder.featurize([Image("a", drawn(1))], "query")
    assert encoder.picture_bytes() == features.per_row["pixels"].nbytes > 0
    assert load_encoder(ModelKeys(model_name="builtin:ngram-bag"), ["a"]).picture_bytes() == 0


def losses(folder: Path) -> list[tuple[float, float]]:
    rows = metric_rows(folder)
    assert all(row["data_seconds"] > 0 for row in rows)
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.slow
def test_a_run_is_the_same_with_0_1_and_2_workers_and_without_any_nothing_forks(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, num_workers: int, augmentation: str = "light") -> None:
        keys = {"model_name": "builtin:tiny-clip", "data_path": str(rows), "test_data_path": str(rows)}
        keys |= {"eval_strategy": "no", "report_to": "none", "output_dir": str(tmp_path / name)}
        numbers = {"batch_size": BATCH, "max_steps": 5, "num_workers": num_workers}
        run_from_config(Config.model_validate({**keys, **numbers, "image_augmentation": augmentation}))

    def fork() -> int:
        raise AssertionError("forked")

    run("1", 1)
    run("2", 2)
    run("other", 2, "none")
    monkeypatch.setattr(os, "fork", fork)
    run("0", 0)
    with pytest.raises(AssertionError, match="forked"):
        run("forks", 1)
    assert losses(tmp_path / "0") == losses(tmp_path / "1") == losses(tmp_path / "2")
    assert losses(tmp_path / "0") != losses(tmp_path / "other")
    rankings = [(tmp_path / name / "evaluation/baseline/run.trec").read_bytes() for name in ("0", "2", "other")]
    assert rankings[0] == rankings[1] == rankings[2], "an evaluation sees pictures as they are"
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("0", "1", "2", "other")]
    assert weights[0] == weights[1] == weights[2] != weights[3]


def test_other_systems_are_told_to_do_without_workers(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(MachineError, match="need Linux; set num_workers to 0"):
        loader_of(source_of(rows), 1)


def test_caches_are_named_from_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = {"model_name": "m", "data_path": "rows.jsonl", "embedding_cache": "~/kept", "teacher_cache": "~/answers"}
    config = Config.model_validate(keys | {"loss_type": "distillation", "teacher_model_name": "teacher"})
    run: Any = Mock(config=config, device=torch.device("cpu"))
    run.plan.way.mode, run.plan.steps = None, SimpleNamespace(total=6, per_epoch=3)
    for name in ("find_frozen", "find_teacher", "Devices"):
        monkeypatch.setattr(made, name, Mock())
    made.frozen_items(run)
    made.teacher_of(run, run.data.records)
    assert made.find_frozen.call_args.args[2] == tmp_path / "kept"  # type: ignore[attr-defined]
    assert made.find_teacher.call_args.args[3] == tmp_path / "answers"  # type: ignore[attr-defined]
