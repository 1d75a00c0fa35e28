"""Batches that change with the model: hard negatives and hard batches that are chosen anew before some epochs.

1. Asked for the first batch of such an epoch, data workers end: they would run ahead with batches of the old kind.
2. All ranks compute with the model as it stands. The first rank writes the result to FOLDER/epoch-0000N.npz, whole or
   not at all, with a hash of the weights.
3. Workers start anew, with batches up to the next such epoch.

A run that is resumed inside these epochs reads the file. A run that starts at the first of them uses the file only if
its weights are those that the file was computed with: after a crash the same steps may have gone another way.

`MiningRefresh` and `HardBatchRefresh` say what is computed; `RefreshedBatches` says when, and keeps it.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import traceback
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from vembed.batch import Ragged
from vembed.data.arrangements import HardBatches
from vembed.errors import MachineError
from vembed.files import new_file
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.profile import CANNOT_RUN
from vembed.models.st_library import CrossEncoder
from vembed.redact import redact
from vembed.text import every, show_duration
from vembed.training.data import build_sampler, image_limits
from vembed.training.model import teacher_keys
from vembed.vectors.encode import ItemEncoder, encoding_budget
from vembed.vectors.items import HardVectors
from vembed.vectors.mining import (
    Miner,
    MiningTask,
    cross_encoder_teacher,
    documents_to_mine,
    encoder_teacher,
    refuse_impossible,
)
from vembed.vectors.provenance import digest, model_key
from vembed.vectors.teacher import ROWS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from vembed.config.schema import Config
    from vembed.data.run_data import RecordCounts, RunData
    from vembed.data.sampler import GlobalSampler
    from vembed.data.table import RecordTable
    from vembed.distributed.ranks import Ranks
    from vembed.training.batches import Batches, BatchSource, FeaturedBatch
    from vembed.vectors.mining import Teacher
    from vembed.vectors.provenance import Key

_log = logging.getLogger(__name__)


class Refresh(Protocol):
    """A computation before some epochs, the first among them, and its effect on the batches."""

    folder: Path  # of its results; all ranks see it

    @property
    def every(self) -> int | None:
        """Epochs from one computation to the next; None for one alone, before the first epoch."""

    @property
    def key(self) -> Key:
        """Everything that the result depends on, except the weights."""

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Compute with the model as it stands; all ranks call it, and the first rank's result is kept."""

    def applied(self, source: BatchSource, result: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return the source of the batches from there on."""


@dataclass(slots=True)
class RefreshedBatches:
    """Batches of a source that a refresh changes before some epochs; use as a context manager."""

    refresh: Refresh
    source: BatchSource
    open: Callable[[BatchSource, int], AbstractContextManager[Batches]]  # source and end -> maker of its batches
    ranks: Ranks
    _opened: ExitStack = field(default_factory=ExitStack)
    _batches: Batches | None = None
    _start: int = 0  # steps that `_batches` makes
    _end: int = 0

    def batch(self, step: int) -> FeaturedBatch:
        """Return the batch of a step, counted from 0.

        Raises:
            MachineError: The result that a resumed run needs is lost, or a result can't be written.
        """
        if self._batches is None or not self._start <= step < self._end:
            self._open(step)
        assert self._batches is not None
        return self._batches.batch(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, traceback)

    def _open(self, step: int) -> None:
        self._opened.close()  # data workers end
        self._batches = None

        # The span of epochs that share a result, of which `step` is in one.
        per_epoch, span = self.source.sampler.batches_per_epoch, self.refresh.every
        epoch = step // per_epoch
        first = 0 if span is None else epoch - epoch % span
        self._start = first * per_epoch
        self._end = 2**62 if span is None else (first + span) * per_epoch

        # Beyond the first step of the span the weights have moved on, so a lost file can't be computed again.
        path = self.refresh.folder / f"epoch-{first + 1:05}.npz"
        weights = model_key(self.source.encoder) if step == self._start else None
        result, why_not = self.ranks.from_first(lambda: self._read(path, weights))
        if result is None and weights is None:
            raise MachineError(
                f"{path}: {why_not}: it was computed with the model before epoch {first + 1}, and this run is beyond; "
                f"go on from an earlier checkpoint with resume=PATH, or start anew with resume=never"
            )
        if result is None:
            result = self.refresh.compute(first)
            made_of = json.dumps({"key": digest(self.refresh.key), "weights": digest(weights)})
            arrays: dict[str, Any] = {"made_of": np.array(made_of), **result}
            self.ranks.from_first(lambda: self._write(path, arrays))
        self._batches = self._opened.enter_context(self.open(self.refresh.applied(self.source, result), self._end))

    def _read(self, path: Path, weights: Key | None) -> tuple[Mapping[str, NDArray[Any]] | None, str]:
        """Return the arrays of a file, or None and why it can't be used."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                made_of = json.loads(str(arrays["made_of"]))
                result = {name: arrays[name] for name in arrays.files if name != "made_of"}
        except FileNotFoundError:
            return None, "it isn't there"
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            return None, f"it can't be read ({error})"
        if made_of.get("key") != digest(self.refresh.key):
            return None, "it was computed with other data or settings"
        if weights is not None and made_of.get("weights") != digest(weights):
            return None, "it was computed with other weights"
        return result, ""

    def _write(self, path: Path, arrays: Mapping[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **arrays)
        except OSError as error:
            raise MachineError(f"{path} can't be written: {error}; free some space there") from error


# Hard negatives -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MiningRefresh:
    """Hard negatives of the training records, mined from their own documents and those of a corpus."""

    config: Config
    data: RunData
    encode: ItemEncoder
    folder: Path
    _task: MiningTask | None = field(default=None, init=False)

    @property
    def every(self) -> int | None:
        """Epochs from one mining to the next; None for one alone."""
        return self.config.mine if isinstance(self.config.mine, int) else None

    @property
    def key(self) -> Key:
        """Everything that the negatives depend on, except the weights."""
        made_of = {"data": self.data.fingerprint, "settings": self.config.mining(), "seed": self.config.seed}
        return made_of if self.config.mine_teacher is None else {**made_of, "teacher": self.config.mine_teacher}

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Mine, and leave a report."""
        config, encode, work = self.config, self.encode, self.folder / f"work-{epoch + 1:05}"
        task = self._task = self._task or MiningTask.of(self.data.records, self.data.corpus)
        _log.info("mining hard negatives before epoch %d", epoch + 1)
        miner = Miner(encode, config, work, config.seed + epoch, self._teacher(task))
        mined = miner.mine(task)
        if encode.ranks.is_first:
            from vembed.evaluation.mining_report import MiningReport, mining_page  # with matplotlib
            from vembed.pages.write import write_page

            source = {"model": f"{redact(config.model_name)} before epoch {epoch + 1}"}
            if config.mine_teacher is not None:
                source["teacher"] = redact(config.mine_teacher)
            report = MiningReport(task, mined, config, source, (), miner.seconds, "")
            _log.info("before epoch %d: %s", epoch + 1, report.headline)
            # The page is for people: one that fails must not cost the negatives, which are mined by now.
            try:
                write_page(self.folder / f"epoch-{epoch + 1:05}", mining_page(report, image_limits(config)))
            except MachineError as error:
                _log.error("the report of the mining could not be written; training continues: %s", error)
            except Exception:  # noqa: BLE001 - whatever it is; the log has the traceback
                problem = traceback.format_exc()
                _log.error("the report of the mining could not be written; training continues\n%s", problem)
        encode.ranks.gather_objects(None)  # all ranks have read the vectors in `work`
        if encode.ranks.is_first:
            shutil.rmtree(work, ignore_errors=True)
        # Mined for each distinct query; records with the same query share its negatives.
        rows_Nn = mined.rows_Un[task.query_of_record_N]  # -1 fills up records with fewer negatives
        counts = (rows_Nn >= 0).sum(axis=1)
        return {"counts": counts, "items": task.documents.numbers_N[rows_Nn[rows_Nn >= 0]]}

    def applied(self, source: BatchSource, result: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return batches of the records with the mined negatives."""
        mined = Ragged(result["items"], np.concatenate([[0], np.cumsum(result["counts"])]))
        records = self.data.records if self.data.corpus is None else self.data.records.with_items(self.data.corpus)
        return replace(source, records=records.with_negatives(mined, replace=self.config.mine_replace))

    def _teacher(self, task: MiningTask) -> Teacher | None:
        """Load the teacher; one that is an encoder encodes the items that it hasn't encoded yet."""
        config, encode = self.config, self.encode
        if config.mine_teacher is None:
            return None
        keys = teacher_keys(config, config.mine_teacher)
        if CrossEncoder.is_meant(keys):
            return cross_encoder_teacher(
                CrossEncoder(keys).to(encode.device), task, ranks=encode.ranks, poll=encode.poll
            )
        # Loaded for this mining alone and dropped behind it: between minings its memory is the step's.
        model = load_encoder(keys, image_limits=image_limits(config)).to(encode.device)
        budget = encoding_budget(model, encode.device, ROWS_AT_ONCE)
        teacher = ItemEncoder(model, budget, encode.device, encode.autocast_dtype, encode.poll, encode.ranks)
        return encoder_teacher(teacher, task, self.folder / "teacher")


def refuse_mining(config: Config, data: RunData) -> None:
    """Refuse negatives that the run couldn't mine, while there is nothing to lose.

    Raises:
        ConfigError: No candidate is left, the model gives several vectors for an item, or FAISS can't build the index.
        DataError: The rows have classes, or the model has no tower for a document.
    """
    if config.mine == "never":
        return
    documents = documents_to_mine(data.records, data.corpus)
    try:
        encoder = load_skeleton(config)
    except CANNOT_RUN:  # the miner asks the encoder with its weights
        return
    refuse_impossible(config, documents, encoder)


def documents_per_query(config: Config, counts: RecordCounts) -> float:
    """Return the mean number of documents of a record, with as many mined ones as there may be."""
    mined = 0 if config.mine == "never" else config.mine_negatives
    in_data = counts.num_documents - (counts.num_negatives if mined and config.mine_replace else 0)
    return in_data / counts.num_records + mined


def mining_bytes(config: Config, data: RunData, dimension: int) -> int:
    """Return the bytes that mining writes at most: float32 vectors of all items, and about 32 bytes for a negative.

    Args:
        dimension: Of the model's vectors; those of a teacher that is an encoder come on top.
    """
    if config.mine == "never":
        return 0
    # Vectors of one mining: its folder of work is deleted before the next one begins.
    dims, counts = dimension, data.counts
    if config.mine_teacher is not None and not CrossEncoder.is_meant(keys := teacher_keys(config, config.mine_teacher)):
        dims += load_skeleton(keys).dimension
    return 4 * dims * (counts.num_records + _num_candidates(data)) + 32 * counts.num_records * config.mine_negatives


def mining_notes(config: Config, data: RunData) -> list[str]:
    """Return the plan's notes: when negatives are mined, and from which documents."""
    if config.mine == "never":
        return []
    when = "before epoch 1" if config.mine == "once" else f"before epoch 1 and {every(config.mine, 'epoch')}"
    note = (
        f"mine: up to {config.mine_negatives} hard negatives of each record {when}, from {_num_candidates(data):,} "
        f"documents; batches are planned with all of them"
    )
    notes = [note]
    if config.mine_teacher is not None:
        notes.append(
            f"mine_teacher {redact(config.mine_teacher)}: its scores decide which candidates are too near; it is "
            f"loaded for each mining, and what an encoder has encoded is kept"
        )
    return notes


def _num_candidates(data: RunData) -> int:
    """Return the number of documents that are mined from; repeated ones count again."""
    return data.counts.num_documents + (0 if data.corpus is None else len(data.corpus))


def mining_facts(folder: Path) -> list[tuple[str, str]]:
    """Return (label, value) of each mining of a run, for its report."""
    facts = []
    for path in sorted(folder.glob("epoch-*/report.json")):
        report = json.loads(path.read_text("utf-8"))
        nearest = report["near_positives"][0]
        near = f"{nearest['negatives']:,} of them above {nearest['above_percent']}% of their positive's score"
        epoch = int(path.parent.name.rpartition("-")[2])
        facts.append((f"hard negatives mined before epoch {epoch}", f"{report['negatives']:,}, {near}"))
    return facts


# Hard batches ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HardBatchRefresh:
    """Batches of rows that lie close together by the vectors of the model as it stands."""

    config: Config
    data: RunData
    encode: ItemEncoder
    folder: Path
    precision: str  # of the encoder's calls
    batch_size: int  # of all devices

    @property
    def every(self) -> int | None:
        """Epochs from one choice to the next."""
        return self.config.hard_refresh if isinstance(self.config.hard_refresh, int) else None

    @property
    def key(self) -> Key:
        """Everything that the vectors depend on, except the weights."""
        return {"data": self.data.fingerprint, "precision": self.precision}

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Encode the rows with the model as it stands; vectors that a killed process left are read."""
        started, work = time.perf_counter(), self.folder / f"work-{epoch + 1:05}"
        hard = HardVectors.of(self.encode.encoder, self.data.records, work, precision=self.precision)
        vectors_NE = hard.vectors(self.encode)
        self.encode.ranks.gather_objects(None)  # all ranks have read them
        if self.encode.ranks.is_first:
            shutil.rmtree(work, ignore_errors=True)
        seconds = time.perf_counter() - started
        _log.info("before epoch %d hard batches were chosen anew, in %s", epoch + 1, show_duration(seconds))
        return {"vectors": vectors_NE, "seconds": np.array(seconds)}

    def applied(self, source: BatchSource, result: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return batches of rows that lie close together."""
        return replace(source, sampler=hard_sampler(self.config, self.data.records, self.batch_size, result["vectors"]))


def hard_sampler(config: Config, records: RecordTable, batch_size: int, vectors_NE: NDArray[Any]) -> GlobalSampler:
    """Return the sampler that puts records into batches by their vectors, (N, E) for N records."""
    arrangement = HardBatches(vectors_NE, config.hard_max_similarity)
    sampler = build_sampler(config, records, batch_size, arrangement)
    _log.info("%s", sampler.arrangement_notes()[-1])  # the plan has those of the sources
    return sampler


def hard_batch_bytes(config: Config, hard: HardVectors, epochs: float) -> int:
    """Return the bytes that choosing hard batches writes at most: vectors of all items, and of the rows each time."""
    if config.hard_refresh == "once":
        return hard.num_bytes
    choices = int(np.ceil(epochs / config.hard_refresh))
    return hard.num_bytes + 2 * hard.dimension * len(hard.records) * choices  # 16 bits for a dimension


def hard_batch_facts(folder: Path) -> list[tuple[str, str]]:
    """Return (label, value) of each choice of hard batches, for the report of a run."""
    facts = []
    for path in sorted(folder.glob("epoch-*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            epoch, seconds = int(path.stem.rpartition("-")[2]), float(arrays["seconds"])
        facts.append((f"hard batches chosen before epoch {epoch}", f"in {show_duration(seconds)}"))
    return facts
