"""Batches of hard negatives: chosen once by the starting model, or anew every n epochs by the model as it then is."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.data.clusters import HardBatches
from vembed.text import show_duration
from vembed.training.hard_vectors import HardVectors
from vembed.training.wiring.data import build_sampler

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.config.schema import Config
    from vembed.data.sampler import GlobalSampler
    from vembed.data.table import RecordTable
    from vembed.evaluation.encode import ItemEncoder
    from vembed.evaluation.provenance import Key
    from vembed.training.batches import BatchSource

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class HardBatchWork:
    """Chooses hard batches anew before some epochs."""

    config: Config
    records: RecordTable
    fingerprint: str  # of the data
    encode: ItemEncoder
    precision: str  # of the encoder's calls
    folder: Path
    batch_size: int  # of all devices

    @property
    def every(self) -> int | None:
        """Epochs from one choice to the next."""
        return self.config.hard_refresh if isinstance(self.config.hard_refresh, int) else None

    @property
    def key(self) -> Key:
        """What the vectors depend on beside the weights."""
        return {"data": self.fingerprint, "precision": self.precision}

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Encode the rows with the model as it is; what a killed process has encoded is read."""
        started, work = time.perf_counter(), self.folder / f"work-{epoch + 1:05}"
        hard = HardVectors.of(self.encode.encoder, self.records, work, precision=self.precision)
        vectors_NE = hard.vectors(self.encode)
        self.encode.ranks.gather_objects(None)  # all have read them
        if self.encode.ranks.is_first:
            shutil.rmtree(work, ignore_errors=True)
        seconds = time.perf_counter() - started
        _log.info("before epoch %d hard batches were chosen anew, in %s", epoch + 1, show_duration(seconds))
        return {"vectors": vectors_NE, "seconds": np.array(seconds)}

    def applied(self, source: BatchSource, found: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return batches of rows that lie close together."""
        return replace(source, sampler=hard_sampler(self.config, self.records, self.batch_size, found["vectors"]))


def hard_sampler(config: Config, records: RecordTable, batch_size: int, vectors_NE: NDArray[Any]) -> GlobalSampler:
    """Return what says which records make up each batch, by their vectors."""
    arrangement = HardBatches(vectors_NE, config.hard_max_similarity)
    sampler = build_sampler(config, records, batch_size, arrangement)
    _log.info("%s", sampler.arrangement_notes()[-1])  # the plan has those of the sources
    return sampler


def hard_batch_bytes(config: Config, hard: HardVectors, epochs: float) -> int:
    """Return what choosing hard batches writes at most: vectors of all items, and for each choice those of rows."""
    if config.hard_refresh == "once":
        return hard.num_bytes
    choices = int(np.ceil(epochs / config.hard_refresh))
    return hard.num_bytes + 2 * hard.dimension * len(hard.records) * choices


def hard_batch_facts(folder: Path) -> list[tuple[str, str]]:
    """Return how long each choice of hard batches took, for the report of a run."""
    facts = []
    for path in sorted(folder.glob("epoch-*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            epoch, seconds = int(path.stem.rpartition("-")[2]), float(arrays["seconds"])
        facts.append((f"hard batches chosen before epoch {epoch}", f"in {show_duration(seconds)}"))
    return facts
