"""Hard negatives that a run mines with its own model, before the first epoch or every n epochs."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Ragged
from vembed.mining.mine import Miner
from vembed.mining.task import MiningTask
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.config.schema import Config
    from vembed.data.records import RecordTable
    from vembed.evaluation.encode import ItemEncoder
    from vembed.evaluation.provenance import Key
    from vembed.training.batches import BatchSource
    from vembed.training.inputs import RecordCounts

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MiningWork:
    """Mines the training records' own documents."""

    config: Config
    records: RecordTable
    fingerprint: str  # of the data
    encode: ItemEncoder
    folder: Path
    _task: MiningTask | None = field(default=None, init=False)

    @property
    def every(self) -> int | None:
        """Epochs from one mining to the next; None is once."""
        return self.config.mine if isinstance(self.config.mine, int) else None

    @property
    def key(self) -> Key:
        """What the negatives depend on beside the weights."""
        return {"data": self.fingerprint, "settings": self.config.mining(), "seed": self.config.seed}

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Mine, and leave a report."""
        config, work = self.config, self.folder / f"work-{epoch + 1:05}"
        task = self._task = self._task or MiningTask.of(self.records)
        _log.info("mining hard negatives before epoch %d", epoch + 1)
        miner = Miner(self.encode, config, work, config.seed + epoch)
        mined = miner.mine(task)
        if self.encode.ranks.is_first:
            from vembed.mining.report import MiningReport, write_mining_report  # with matplotlib

            source = {"model": f"{redact(config.model_name)} before epoch {epoch + 1}"}
            report = MiningReport(task, mined, config, source, (), miner.seconds.parts, "")
            write_mining_report(self.folder / f"epoch-{epoch + 1:05}", report)
            _log.info("before epoch %d: %s", epoch + 1, report.headline)
        self.encode.ranks.gather_objects(None)  # all have read the blocks
        if self.encode.ranks.is_first:
            shutil.rmtree(work, ignore_errors=True)
        rows_Nn = mined.rows_Un[task.query_of_record_N]
        counts = (rows_Nn >= 0).sum(axis=1)
        return {"counts": counts, "items": task.documents.numbers_U[rows_Nn[rows_Nn >= 0]]}

    def applied(self, source: BatchSource, found: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return batches of the records with what was mined."""
        mined = Ragged(found["items"], np.concatenate([[0], np.cumsum(found["counts"])]))
        return replace(source, records=self.records.with_negatives(mined, replace=self.config.mine_replace))


def documents_per_query(config: Config, counts: RecordCounts) -> float:
    """Return how many documents a record has at most in the mean, with what is mined for it."""
    mined = 0 if config.mine == "never" else config.mine_negatives
    given = counts.num_documents - (counts.num_negatives if mined and config.mine_replace else 0)
    return given / counts.num_records + mined


def mining_bytes(config: Config, counts: RecordCounts, dimension: int) -> int:
    """Return what mining writes at most: a vector of each item, which goes again, and numbers of negatives."""
    if config.mine == "never":
        return 0
    return 4 * dimension * (counts.num_records + counts.num_documents) + 32 * counts.num_records * config.mine_negatives


def mining_notes(config: Config, counts: RecordCounts) -> list[str]:
    """Say in the plan when negatives are mined, and what of."""
    if config.mine == "never":
        return []
    when = "before epoch 1" if config.mine == "once" else f"before epoch 1 and every {config.mine} epochs"
    told = f"mine: up to {config.mine_negatives} hard negatives of each record {when}, from {counts.num_documents:,}"
    return [f"{told} documents; batches are planned with all of them"]


def mining_facts(folder: Path) -> list[tuple[str, str]]:
    """Return what the minings of a run came to, for its report."""
    facts = []
    for path in sorted(folder.glob("epoch-*/report.json")):
        found = json.loads(path.read_text("utf-8"))
        rate = found["false_negatives"]
        doubt = "" if rate is None else f", about {100 * rate['rate']:.1f}% of them probably false"
        epoch = int(path.parent.name.rpartition("-")[2])
        facts.append((f"hard negatives mined before epoch {epoch}", f"{found['negatives']:,}{doubt}"))
    return facts
