"""The data of a run: what it trains on, what chooses the best checkpoint, and what the verdict is on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, content_id
from vembed.data.hold_out import ENOUGH_QUERIES, divide, held_out_task, hold_out, resolution_notes
from vembed.data.keys import listed
from vembed.data.overlap import JudgedSets
from vembed.data.picture_survey import ItemCounts, PictureSizes, PictureSurvey
from vembed.data.read import DataSource, describe, example, read
from vembed.data.table import TEXT, LoadedRecords, RecordTable
from vembed.errors import DataError
from vembed.redact import redact
from vembed.text import plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import ImageLimits, Item, Side
    from vembed.data.columns import LossNeeds
    from vembed.data.judged import RetrievalData
    from vembed.data.keys import DataKeys
    from vembed.data.overlap import Overlap
    from vembed.data.table import ItemTable


SUGGESTED_SET = "builtin:stdlib-code"

SHOWN_LEAKS = 3
"""Training rows that stand in the message about leaking ones."""


@dataclass(frozen=True, slots=True)
class FurtherSet:
    """A set that is evaluated before and after training."""

    role: Literal["test", "guard"]
    number: int  # among the further sets of the run, from 1
    task: RetrievalData

    @property
    def folder(self) -> str:
        """What holds its results, below `evaluation/`."""
        return f"{self.role}-{self.number}"


@dataclass(frozen=True, slots=True)
class RunData:
    """The data, checked."""

    records: RecordTable  # to train on
    dev: RetrievalData | None  # set that chooses the best checkpoint
    test: RetrievalData | None  # set of the verdict, the first of several
    notes: tuple[str, ...]  # what was held out, skipped or ignored, one plain sentence each
    counts: RecordCounts  # what the training records hold
    fingerprint: str  # hash of the training records and of the dev and test sets
    hashes: Mapping[str, str]  # "training", "dev", "test" or a further set's folder -> hash of its content
    num_invalid: int = 0  # rows of the training data that were skipped because they can't be used
    sources: tuple[str, ...] = ()  # what the training records were read from
    read: Mapping[str, str] = field(default_factory=dict)  # what was read of each source, by label, for the plan
    more_facts: tuple[tuple[str, str], ...] = ()  # what the run did with them, as (label, value)
    further: tuple[FurtherSet, ...] = ()  # other test sets, and guard sets
    judged: JudgedSets | None = None  # sets that were given, compared with the training rows
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)  # what came of it, by the names of `hashes`
    corpus: ItemTable | None = None  # further documents that negatives are mined from

    def with_corpus(self, corpus: ItemTable) -> RunData:
        """Return the data with further documents that negatives are mined from."""
        both = hashlib.sha256(self.fingerprint.encode() + corpus.ids.astype("<i8").tobytes()).hexdigest()
        return replace(self, corpus=corpus, fingerprint=both)

    @property
    def sets(self) -> dict[str, RetrievalData]:
        """Every set that is evaluated, by the names of `hashes`."""
        sets = {"dev": self.dev, "test": self.test, **{each.folder: each.task for each in self.further}}
        return {name: task for name, task in sets.items() if task is not None}

    def set_facts(self) -> dict[str, str]:
        """Return the sizes of the dev, test and guard sets and what they share with the training rows, by label."""
        lines: dict[str, list[str]] = {}
        for name, task in self.sets.items():
            overlap = f"; {self.overlaps[name].line}" if name in self.overlaps else ""
            lines.setdefault(f"{name.partition('-')[0]} set", []).append(_task_fact(task) + overlap)
        return {label: redact(" | ".join(of_role)) for label, of_role in lines.items()}

    def leaks(self) -> list[str]:
        """Return a sentence for each set with queries that training rows hold with an answer."""
        leaks = []
        for name, overlap in self.overlaps.items():
            if overlap.trained:
                rows = sorted({row for rows in overlap.trained.values() for row in rows})
                shown = ", ".join(record.location for record in self.records.take(rows[:SHOWN_LEAKS]))
                leaks.append(
                    redact(
                        f"{len(overlap.trained):,} of {plural(overlap.num_queries, 'query', 'queries')} of "
                        f"{self.sets[name].name} are trained on with an answer ({plural(len(rows), 'row')}: {shown}"
                        f"{', ...' if len(rows) > SHOWN_LEAKS else ''}); leak=drop leaves these rows out"
                    )
                )
        return leaks

    def facts(self) -> list[tuple[str, str]]:
        """Return (label, value) for the report."""
        counts = self.counts
        facts = [
            ("training records", str(counts.num_records)),
            ("documents in them", str(counts.num_documents)),
            ("hard negatives among those", str(counts.num_negatives)),
            ("records whose query another record before has", str(counts.repeated_queries)),
            ("positives that another record before has", str(counts.repeated_positives)),
            ("rows skipped because they can't be used", str(self.num_invalid)),
        ]
        if len(self.sources) > 1:
            each = np.bincount(self.records.sources, minlength=len(self.sources))
            facts[1:1] = [(f"of {path}", str(count)) for path, count in zip(self.sources, each.tolist(), strict=True)]
        if self.corpus is not None:
            facts.append(("further documents to mine from", str(len(self.corpus))))
        if counts.items.has_pictures:
            facts += [
                ("training direction", counts.items.direction),
                ("distinct pictures in them", counts.pictures.text),
            ]
        facts += self.read.items()
        for name, task in self.sets.items():
            overlap = f"; {self.overlaps[name].line}" if name in self.overlaps else ""
            facts.append((f"{name.partition('-')[0]} set", _task_fact(task) + overlap))
        return [*facts, *self.more_facts, *(("note", note) for note in self.notes)]


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """What records hold."""

    num_records: int
    num_documents: int  # positives and negatives, repeated ones counted again
    num_negatives: int  # hard negatives among them
    repeated_queries: int  # records whose query another record before had
    repeated_positives: int
    items: ItemCounts  # texts and pictures by side
    pictures: PictureSizes  # each content once

    @classmethod
    def of(cls, records: RecordTable, image_limits: ImageLimits) -> RecordCounts:
        """Count; of pictures the headers are read."""
        queries = records.column("query").to_numpy()
        (_, positives), (_, negatives) = map(records.lists, ("positives", "negatives"))
        documents = np.concatenate([positives, negatives])
        ids, modalities = records.items.ids, records.items.modalities
        sides: dict[Side, NDArray[np.int64]] = {"query": queries, "document": documents}
        items = ItemCounts(
            {
                words: {side: int((modalities[numbers] == place).sum()) for side, numbers in sides.items()}
                for place, (_, words) in enumerate(MODALITY_WORDS.values())
            }
        )
        survey = PictureSurvey(image_limits)
        with_pictures = [numbers[modalities[numbers] != TEXT] for numbers in sides.values()]
        survey.add(records.items.walk(np.unique(np.concatenate(with_pictures))))
        return cls(
            num_records=len(records),
            num_documents=len(documents),
            num_negatives=len(negatives),
            repeated_queries=_num_repeated(ids[queries]),
            repeated_positives=_num_repeated(ids[positives]),
            items=items,
            pictures=survey.result(),
        )


def _num_repeated(ids_N: NDArray[np.int64]) -> int:
    """Return how many ids stand for a second time or more; sorting is several times as fast as `np.unique`."""
    return int((np.diff(np.sort(ids_N)) == 0).sum())


def refuse_missing_data(keys: DataKeys) -> None:
    """Refuse data of a run that aren't there, before torch is imported and a model is loaded.

    Raises:
        DataError: No training data is named, or a path leads nowhere.
        MachineError: A file can't be opened.
    """
    for source in all_sources(keys):
        source.refuse_missing()


def all_sources(keys: DataKeys, loss: LossNeeds | None = None) -> list[DataSource]:
    """Return each source of a run's data: training, dev, test and guard sets.

    Raises:
        DataError: No training data is named.
    """
    found = _sources(keys, loss)
    if keys.val_data_path is not None:
        found.append(read(keys.val_data_path, "validation", keys, split=keys.val_data_split, loss=loss))
    return [*found, *_judged(keys, loss)]


def load_run_data(keys: DataKeys, *, needs_dev: bool, divides: bool = False, loss: LossNeeds | None = None) -> RunData:
    """Read and check all data of a run.

    Args:
        needs_dev: Whether a dev set is held out where none is given.
        divides: Whether what is held out is divided into a dev set and a test set where none is given of both.

    Raises:
        DataError: No training data is named, or any data is missing or broken, or is searched in another way than
            `retrieval_mode` says, or training rows hold judged pairs and `leak` refuses that.
    """
    refuse_missing_data(keys)
    sources = _sources(keys, loss)
    paths, parts = [source.path for source in sources], [source.records() for source in sources]
    loaded = _joined(parts, paths)
    if keys.source_batches == "single":  # each batch is of one source, so each source must teach something by itself
        for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
            _refuse_alike(part, path, None if loss is None else loss.for_source(number))
    else:
        _refuse_alike(loaded, " and ".join(paths), loss)
    records, notes = loaded.table, list(loaded.notes)
    dev = None
    if keys.val_data_path is not None:
        source = read(keys.val_data_path, "validation", keys, split=keys.val_data_split, loss=loss)
        dev = source.judged(takes_pairs=True)
    judged = _told_apart(_judged(keys, loss))
    test = judged.pop(0)[1] if keys.test_data_path else None
    further = tuple(
        FurtherSet("guard" if role == "guard" else "test", number, task)
        for number, (role, task) in enumerate(judged, start=1)
    )
    given = {"dev": dev, "test": test, **{each.folder: each.task for each in further}}
    compared = {name: task for name, task in given.items() if task is not None}
    judged_sets = JudgedSets(compared, records) if compared else None
    uses: dict[str, NDArray[np.int64]] = {}  # what rows are for that aren't trained on -> their sources
    if judged_sets is not None and keys.leak != "warn":
        leaking = _leaking_rows(judged_sets.overlaps(records), records, compared, refuses=keys.leak == "refuse")
        if len(leaking):
            uses["left out (leak: drop)"] = records.sources[leaking]
            records = records.subset(np.delete(np.arange(len(records)), leaking))
    if dev is None and needs_dev:
        split = hold_out(records, fraction=None if keys.val_fraction == "auto" else keys.val_fraction)
        notes += split.notes
        halves = divide(records, split) if divides and test is None else None
        if halves is None:
            dev = held_out_task(records, split, keys.label_kind)
            uses["dev"] = records.sources[split.held_out_rows]
        else:
            dev, test = (
                held_out_task(records, half, keys.label_kind, name=f"held-out {name}")
                for half, name in zip(halves, ("dev", "test"), strict=True)
            )
            uses |= {
                name: records.sources[half.held_out_rows] for half, name in zip(halves, ("dev", "test"), strict=True)
            }
            notes.append("They are divided by content: one half chooses the checkpoint, the other gives the verdict.")
        records = records.subset(split.train_rows)
    notes += () if dev is None or dev.grades else resolution_notes(len(dev.queries))
    counts = RecordCounts.of(records, sources[0].image_limits)
    counts.items.require(keys.retrieval_mode, " and ".join(paths))
    given |= {"dev": dev, "test": test}
    named = {name: task for name, task in given.items() if task is not None}
    tasks = list(named.values())
    guards = [each.task for each in further if each.role == "guard"]
    for task in tasks:
        if not any(task is guard for guard in guards):  # those may be of any kind
            ItemCounts.of(task).require(keys.retrieval_mode, task.name)
        notes += task.notes
    if keys.image_root is not None and not _any_pictures(counts, tasks):
        notes.append("image_root has no effect: the data hold no pictures.")
    fingerprint, hashes = _hashes(records, named)
    if divides and hashes.get("test") in (None, hashes["dev"]):
        which = "the test set is the dev set" if test else "no test set"
        more = f" (half of {2 * ENOUGH_QUERIES} or more held-out queries would be one)" if "dev" in uses else ""
        notes.append(
            f"{which}{more}: the verdict is on the rows that choose the checkpoint; give other test_data_path."
        )
    return RunData(
        records,
        dev,
        test,
        tuple(notes),
        counts,
        fingerprint,
        hashes,
        loaded.num_invalid,
        tuple(paths),
        _read(paths, parts, {use: np.bincount(sources, minlength=len(parts)) for use, sources in uses.items()}),
        further=further,
        judged=judged_sets,
        overlaps={} if judged_sets is None else judged_sets.overlaps(records),
    )


def _leaking_rows(
    overlaps: Mapping[str, Overlap], records: RecordTable, tasks: Mapping[str, RetrievalData], *, refuses: bool
) -> list[int]:
    """Return the rows that hold a judged query with an answer.

    Raises:
        DataError: There are some and they are refused, or no other row is left.
    """
    names_of = {
        row: tasks[name].name for name, each in overlaps.items() for rows in each.trained.values() for row in rows
    }
    leaking = sorted(names_of)
    if not leaking or (not refuses and len(leaking) < len(records)):
        return leaking
    names = " and ".join(sorted(set(names_of.values())))
    shown = records.take(leaking[:SHOWN_LEAKS])
    examples = "".join(f"\n  {record.location}: {example(record)}" for record in shown)
    cure = (
        "leak is refuse: set it to drop to leave these rows out, or give other sets"
        if refuses
        else "leak: drop leaves no row to train on; give other sets, or other training data"
    )
    what = f"{len(leaking):,} of {plural(len(records), 'training row')} hold a query of {names} with an answer"
    raise DataError(redact(f"{what}:{examples}\n{cure}"))


def _judged(keys: DataKeys, loss: LossNeeds | None = None) -> list[DataSource]:
    """Return each test set and each guard set."""
    return [
        *(read(path, "test", keys, split=keys.test_data_split, loss=loss) for path in listed(keys.test_data_path)),
        *(read(path, "guard", keys, split=keys.guard_data_split, loss=loss) for path in listed(keys.guard_data)),
    ]


def _told_apart(sources: Sequence[DataSource]) -> list[tuple[str, RetrievalData]]:
    """Read test and guard sets and return each one's role and task; names that repeat become their paths."""
    tasks = [source.judged(takes_pairs=True) for source in sources]
    counts = Counter(task.name for task in tasks)
    found: list[tuple[str, RetrievalData]] = []
    for source, task in zip(sources, tasks, strict=True):
        whole = redact(f"{source.path}/{source.split}" if source.split else source.path)
        found.append((source.role, replace(task, name=whole) if counts[task.name] > 1 else task))
    return found


def _sources(keys: DataKeys, loss: LossNeeds | None = None) -> list[DataSource]:
    """Return each source of the training data.

    Raises:
        DataError: No training data is named.
    """
    if keys.data is None and keys.data_path is None:
        raise DataError(f"data_path is not set; --config_override data_path={SUGGESTED_SET} trains on a built-in set")
    if keys.data_path is not None:
        return [read(keys.data_path, "train", keys, split=keys.data_split, loss=loss)]
    found = []
    for number, source in enumerate(keys.data or ()):
        mapping = keys.column_mapping if source.column_mapping is None else source.column_mapping
        own = keys.model_copy(update={"column_mapping": mapping})
        needs = None if loss is None else loss.for_source(number)
        found.append(read(source.path, "train", own, split=source.split, loss=needs))
    return found


def _read(
    paths: Sequence[str], loaded: Sequence[LoadedRecords], uses: Mapping[str, NDArray[np.int64]]
) -> dict[str, str]:
    """Return what was read of each source; the labels of several are numbered.

    Args:
        uses: What rows are for that aren't trained on -> how many of each source.
    """
    lines: dict[str, str] = {}
    for place, (path, part) in enumerate(zip(paths, loaded, strict=True)):
        end = f" {place + 1}" if len(loaded) > 1 else ""
        counts = {use: int(count[place]) for use, count in uses.items()}
        lines |= {f"{label}{end}": line for label, line in describe(path, part, parts=counts).items()}
    return lines


def _joined(loaded: Sequence[LoadedRecords], paths: Sequence[str]) -> LoadedRecords:
    """Return the records of all sources; which columns were ignored stands in what was read."""
    loaded = [
        replace(each, notes=tuple(note for note in each.notes if note not in each.columns.notes)) for each in loaded
    ]
    if len(loaded) == 1:
        return loaded[0]
    notes = tuple(f"{path}: {note}" for path, each in zip(paths, loaded, strict=True) for note in each.notes)
    table = RecordTable.joined([each.table for each in loaded])
    return LoadedRecords(table, notes, sum(each.num_invalid for each in loaded))


def _refuse_alike(loaded: LoadedRecords, path: str, loss: LossNeeds | None) -> None:
    """Refuse records that are all alike in what the loss learns from: one class, one score, one positive.

    Every document would then be as right as any other, and the loss would be 0 from the first step.

    Raises:
        DataError: Names the file, the column and what to do.
    """
    table, takes = loaded.table, ("positives",) if loss is None else loss.takes
    if len(table) < 2:
        return
    classes_N, classes = table.classes
    _, scores_M = table.listed
    positives = table.items.ids[table.numbers("positives")[1]]
    used = loaded.columns.used
    label = " and ".join(used.get("label", ["label"]))
    positive = " and ".join(used.get("positive") or used.get("positive_image") or ["positive"])
    drop = f"or drop this one with column_mapping: {{{label}: null}}"
    if len(classes) == 1 and classes_N.min() == 0:
        alike = f"are of one class, {classes[0]!r:.60} (column {label})"
        why = "every document is a positive of every query"
        cure = f"map the column of the classes with column_mapping: {{COLUMN: label}}, {drop}"
    elif len(scores_M) and scores_M.min() == scores_M.max():
        alike = f"have the same label, {scores_M[0]:g} (column {label})"
        why = "no pair is closer than another"
        cure = "map the column of the labels with column_mapping: {COLUMN: label}"
        cure += f", {drop} and set loss_type: infonce" if scores_M[0] > 0 else ""
    elif not len(scores_M) and "positives" in takes and len(positives) and (positives == positives[0]).all():
        first = table[0].positives[0]
        shown = quoted(first) if isinstance(first, str) else "a picture"
        alike = f"have the same positive, {shown} (column {positive})"
        why = "no document is a negative"
        cure = "map the column of the answers with column_mapping: {COLUMN: positive}"
    else:
        return
    raise DataError(f"{path}: all {len(table):,} rows {alike}, so {why} and nothing can be learnt; {cure}")


def _any_pictures(counts: RecordCounts, tasks: Sequence[RetrievalData]) -> bool:
    """Return whether any set of a run has a picture."""
    return counts.items.has_pictures or any(ItemCounts.of(task).has_pictures for task in tasks)


def _task_fact(task: RetrievalData) -> str:
    """Return what a set holds; where there are pictures, also what searches what."""
    items = ItemCounts.of(task)
    sizes = f"{task.name}: {len(task.queries)} queries, {len(task.documents)} documents"
    if task.grades:
        sizes += f", {sum(map(len, task.grades.values()))} pairs with a {'grade' if task.kind == 'grade' else 'truth'}"
    return f"{sizes}; {items.direction}" if items.has_pictures else sizes


def _hashes(records: RecordTable, tasks: Mapping[str, RetrievalData]) -> tuple[str, dict[str, str]]:
    """Return one hash (hex) of all that a run reads, and that of each part by name.

    The verdict compares a baseline with a final of the same set, and runs are compared on sets of equal content.
    """
    whole = hashlib.sha256(records.fingerprint.encode())
    hashes = {"training": records.fingerprint}
    for name, task in tasks.items():
        own = hashlib.sha256()
        for line in _content_lines(task):
            whole.update(line)
            own.update(line)
        hashes[name] = own.hexdigest()
    return whole.hexdigest(), hashes


def content_hash(task: RetrievalData) -> str:
    """Return the hash (hex) of a set's queries, documents, judgements and limits, whatever it is called."""
    digest = hashlib.sha256()
    for line in _content_lines(task):
        digest.update(line)
    return digest.hexdigest()


def _content_lines(task: RetrievalData) -> Iterator[bytes]:
    for part in (task.queries, task.documents, task.qrels):
        for key, value in part.items():
            yield json.dumps((key, _fingerprint_of(value))).encode()
        yield b"\n"
    if task.grades:
        yield json.dumps([task.kind, *task.grades.items()]).encode()
    for limits in (task.excluded, task.candidates):
        if limits:
            yield json.dumps([(query, sorted(ids)) for query, ids in limits.items()]).encode()


def _fingerprint_of(value: Item | Mapping[str, int]) -> object:
    """Return a text or judgements as they are, and of a picture what it shows, wherever it lies."""
    if isinstance(value, Composed):
        first, *more = (content_id(image) for image in value.images)
        return {"picture": first, "text": value.text} | ({"further": more} if more else {})
    return {"picture": content_id(value)} if isinstance(value, Image) else value


def record_texts(records: RecordTable) -> Iterator[str]:
    """Yield every text of the records, for tokenizers that are trained on them; pictures are passed over."""
    for record in records:
        for item in (record.query, *record.positives, *record.negatives):
            if not isinstance(item, Image):
                yield item.text if isinstance(item, Composed) else item
