"""Hard negatives that a run mines with its own model, before the first epoch or every n epochs."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Ragged
from vembed.evaluation.encode import ItemEncoder, encoding_budget
from vembed.mining.mine import Miner, refuse_impossible
from vembed.mining.task import MiningTask, documents_to_mine
from vembed.mining.teacher import CrossEncoderTeacher, EncoderTeacher
from vembed.models.cross_encoder import CrossEncoder
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.profile.profile import CANNOT_RUN
from vembed.redact import redact
from vembed.text import every
from vembed.training.teacher import ROWS_AT_ONCE
from vembed.training.wiring.data import image_limits
from vembed.training.wiring.model import teacher_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.config.schema import Config
    from vembed.evaluation.provenance import Key
    from vembed.mining.mine import Teacher
    from vembed.training.batches import BatchSource
    from vembed.training.inputs import RecordCounts, RunData

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MiningWork:
    """Mines the training records' own documents, and those of a corpus."""

    config: Config
    data: RunData
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
        made_of = {"data": self.data.fingerprint, "settings": self.config.mining(), "seed": self.config.seed}
        return made_of if self.config.mine_teacher is None else {**made_of, "teacher": self.config.mine_teacher}

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Mine, and leave a report."""
        config, work = self.config, self.folder / f"work-{epoch + 1:05}"
        task = self._task = self._task or MiningTask.of(self.data.records, self.data.corpus)
        _log.info("mining hard negatives before epoch %d", epoch + 1)
        miner = Miner(self.encode, config, work, config.seed + epoch, self._teacher(task))
        mined = miner.mine(task)
        if self.encode.ranks.is_first:
            from vembed.mining.report import MiningReport, mining_page  # with matplotlib
            from vembed.pages.write import write_page

            source = {"model": f"{redact(config.model_name)} before epoch {epoch + 1}"}
            if config.mine_teacher is not None:
                source["teacher"] = redact(config.mine_teacher)
            report = MiningReport(task, mined, config, source, (), miner.seconds.parts, "")
            write_page(self.folder / f"epoch-{epoch + 1:05}", mining_page(report, image_limits(config)))
            _log.info("before epoch %d: %s", epoch + 1, report.headline)
        self.encode.ranks.gather_objects(None)  # all have read the blocks
        if self.encode.ranks.is_first:
            shutil.rmtree(work, ignore_errors=True)
        rows_Nn = mined.rows_Un[task.query_of_record_N]
        counts = (rows_Nn >= 0).sum(axis=1)
        return {"counts": counts, "items": task.documents.numbers_N[rows_Nn[rows_Nn >= 0]]}

    def applied(self, source: BatchSource, found: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return batches of the records with what was mined."""
        mined = Ragged(found["items"], np.concatenate([[0], np.cumsum(found["counts"])]))
        records = self.data.records if self.data.corpus is None else self.data.records.with_items(self.data.corpus)
        return replace(source, records=records.with_negatives(mined, replace=self.config.mine_replace))

    def _teacher(self, task: MiningTask) -> Teacher | None:
        """Load the teacher, and have an encoder encode what it hasn't yet."""
        config, encode = self.config, self.encode
        if config.mine_teacher is None:
            return None
        keys = teacher_keys(config, config.mine_teacher)
        if CrossEncoder.is_meant(keys):
            return CrossEncoderTeacher.of(
                CrossEncoder(keys).to(encode.device), task, ranks=encode.ranks, poll=encode.poll
            )
        model = load_encoder(keys, image_limits=image_limits(config)).to(encode.device)
        budget = encoding_budget(model, encode.device, ROWS_AT_ONCE)
        own = ItemEncoder(model, budget, encode.device, encode.autocast_dtype, encode.poll, encode.ranks)
        return EncoderTeacher.of(own, task, self.folder / "teacher")


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
    """Return how many documents a record has at most in the mean, with what is mined for it."""
    mined = 0 if config.mine == "never" else config.mine_negatives
    given = counts.num_documents - (counts.num_negatives if mined and config.mine_replace else 0)
    return given / counts.num_records + mined


def mining_bytes(config: Config, data: RunData, dimension: int) -> int:
    """Return what mining writes at most: vectors of each item, and numbers of negatives."""
    if config.mine == "never":
        return 0
    dims, counts = dimension, data.counts
    if config.mine_teacher is not None and not CrossEncoder.is_meant(keys := teacher_keys(config, config.mine_teacher)):
        dims += load_skeleton(keys).dimension
    return 4 * dims * (counts.num_records + _num_documents(data)) + 32 * counts.num_records * config.mine_negatives


def mining_notes(config: Config, data: RunData) -> list[str]:
    """Say in the plan when negatives are mined, and what of."""
    if config.mine == "never":
        return []
    when = "before epoch 1" if config.mine == "once" else f"before epoch 1 and {every(config.mine, 'epoch')}"
    told = f"mine: up to {config.mine_negatives} hard negatives of each record {when}, from {_num_documents(data):,}"
    notes = [f"{told} documents; batches are planned with all of them"]
    if config.mine_teacher is not None:
        notes.append(
            f"mine_teacher {redact(config.mine_teacher)}: its scores decide which candidates are too near; it is "
            f"loaded for each mining, and what an encoder has encoded is kept"
        )
    return notes


def _num_documents(data: RunData) -> int:
    """Return how many documents are mined from, repeated ones counted again."""
    return data.counts.num_documents + (0 if data.corpus is None else len(data.corpus))


def mining_facts(folder: Path) -> list[tuple[str, str]]:
    """Return what the minings of a run came to, for its report."""
    facts = []
    for path in sorted(folder.glob("epoch-*/report.json")):
        found = json.loads(path.read_text("utf-8"))
        nearest = found["near_positives"][0]
        near = f"{nearest['negatives']:,} of them above {nearest['above_percent']}% of their positive's score"
        epoch = int(path.parent.name.rpartition("-")[2])
        facts.append((f"hard negatives mined before epoch {epoch}", f"{found['negatives']:,}, {near}"))
    return facts
