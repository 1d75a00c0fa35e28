"""Load the data of a run: rows to train on, a dev set that chooses the checkpoint, and sets that give the verdict.

`load_run_data` is the only call that training makes. In this order:

1. Read the sources of the training rows, refuse rows that are all alike, and join them.
2. Read the dev, test and guard sets that are named, and compare them with the rows: rows that hold a judged query with
   its answer leak, and are refused, left out or told, as `leak` says.
3. Hold a dev set out of the rows where none is named, and a test set where the rows are enough for both.
4. Count texts and pictures, and refuse sets that are searched in another way than `retrieval_mode` says.
5. Hash it all: a run resumes over equal data only, and a verdict compares models on equal sets.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, content_id
from vembed.data.describe import describe_source, example
from vembed.data.hold_out import ENOUGH_QUERIES, divide, held_out_task, hold_out, resolution_notes
from vembed.data.keys import listed
from vembed.data.overlap import JudgedSets
from vembed.data.picture_survey import ItemCounts, PictureSurvey
from vembed.data.read import DataSource
from vembed.data.table import TEXT, LoadedRecords, RecordTable
from vembed.errors import DataError
from vembed.redact import redact
from vembed.text import plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import ImageLimits, Side
    from vembed.data.columns import LossNeeds
    from vembed.data.judged import RetrievalData
    from vembed.data.keys import DataKeys
    from vembed.data.overlap import Overlap
    from vembed.data.table import ItemTable


SUGGESTED_SET = "builtin:stdlib-code"

SHOWN_LEAKS = 3
"""Training rows that a message about leaks names."""


@dataclass(frozen=True, slots=True)
class RunData:
    """The checked data of a run."""

    records: RecordTable  # to train on
    dev: RetrievalData | None  # set that chooses the best checkpoint
    test: RetrievalData | None  # set of the verdict, the first of several
    notes: tuple[str, ...]  # what was held out, skipped or ignored, one plain sentence each
    counts: RecordCounts  # of the training records
    fingerprint: str  # hash of the training records and of the dev and test sets
    hashes: Mapping[str, str]  # "training", "dev", "test" or a further set's name -> hash of its content
    num_invalid: int = 0  # rows of the training data that were skipped because they can't be used
    sources: tuple[str, ...] = ()  # paths of the training records
    read: Mapping[str, str] = field(default_factory=dict)  # rows, columns and an example of each source, by label
    more_facts: tuple[tuple[str, str], ...] = ()  # what the run did with them, as (label, value)
    # Other test sets, and guard sets, by the folder of their results: "test-1", "guard-2".
    further: Mapping[str, RetrievalData] = field(default_factory=dict)
    judged: JudgedSets | None = None  # sets that are named in the keys, compared with the training rows
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)  # of that comparison, by the names of `hashes`
    corpus: ItemTable | None = None  # further documents that negatives are mined from

    def with_corpus(self, corpus: ItemTable) -> RunData:
        """Return the data with further documents that negatives are mined from."""
        # A run over another corpus mines other negatives, so it must not resume over this one.
        both = hashlib.sha256(self.fingerprint.encode() + corpus.ids.astype("<i8").tobytes()).hexdigest()
        return replace(self, corpus=corpus, fingerprint=both)

    @property
    def sets(self) -> dict[str, RetrievalData]:
        """Every set that is evaluated, by the names of `hashes`."""
        sets = {"dev": self.dev, "test": self.test, **self.further}
        return {name: task for name, task in sets.items() if task is not None}

    def set_facts(self) -> dict[str, str]:
        """Return the sizes of the dev, test and guard sets and what they share with the training rows, by label."""
        lines: dict[str, list[str]] = {}
        for label, line in self._set_lines():
            lines.setdefault(label, []).append(line)
        return {label: redact(" | ".join(of_role)) for label, of_role in lines.items()}

    def _set_lines(self) -> list[tuple[str, str]]:
        """Return ("test set", size and overlap) of every set; several of a role have one label."""
        lines = []
        for name, task in self.sets.items():
            items = ItemCounts.of(task)
            sizes = plural(len(task.queries), "query", "queries"), plural(len(task.documents), "document")
            line = f"{task.name}: {', '.join(sizes)}"
            if task.grades:
                num_pairs = sum(map(len, task.grades.values()))
                line += f", {num_pairs} pairs with a {'grade' if task.kind == 'grade' else 'truth'}"
            line += f"; {items.direction}" if items.has_pictures else ""
            line += f"; {self.overlaps[name].line}" if name in self.overlaps else ""
            lines.append((f"{name.partition('-')[0]} set", line))
        return lines

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
            rows = np.bincount(self.records.sources, minlength=len(self.sources))
            facts[1:1] = [(f"of {path}", str(count)) for path, count in zip(self.sources, rows.tolist(), strict=True)]
        if self.corpus is not None:
            facts.append(("further documents to mine from", str(len(self.corpus))))
        if counts.items.has_pictures:
            facts += [
                ("training direction", counts.items.direction),
                ("distinct pictures in them", counts.pictures.text),
            ]
        facts += [*self.read.items(), *self._set_lines()]
        return [*facts, *self.more_facts, *(("note", note) for note in self.notes)]


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """Numbers of queries, documents and pictures of records."""

    num_records: int
    num_documents: int  # positives and negatives, repeated ones counted again
    num_negatives: int  # hard negatives among them
    repeated_queries: int  # records whose query another record before had
    repeated_positives: int
    items: ItemCounts  # texts and pictures by side
    pictures: PictureSurvey  # each content once

    @classmethod
    def of(cls, records: RecordTable, image_limits: ImageLimits) -> RecordCounts:
        """Count queries, documents and repeats; of pictures the headers are read."""
        # All but the survey of pictures works on ids and modalities: no text of a million rows becomes a Python object.
        queries = records.column("query").to_numpy()
        (_, positives), (_, negatives) = map(records.lists, ("positives", "negatives"))
        documents = np.concatenate([positives, negatives])
        ids, modalities = records.items.ids, records.items.modalities
        sides: dict[Side, NDArray[np.int64]] = {"query": queries, "document": documents}
        items = ItemCounts(
            {
                words: {side: int((modalities[numbers] == code).sum()) for side, numbers in sides.items()}
                for code, (_, words) in enumerate(MODALITY_WORDS.values())
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
            pictures=survey,
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
    sources = _training_sources(keys, loss)
    if keys.val_data_path is not None:
        sources.append(DataSource(keys.val_data_path, "validation", keys, split=keys.val_data_split, loss=loss))
    return [*sources, *_verdict_sources(keys, loss)]


def _training_sources(keys: DataKeys, loss: LossNeeds | None) -> list[DataSource]:
    if keys.data is None and keys.data_path is None:
        raise DataError(f"data_path is not set; --config_override data_path={SUGGESTED_SET} trains on a built-in set")
    if keys.data_path is not None:
        return [DataSource(keys.data_path, "train", keys, split=keys.data_split, loss=loss)]
    # An entry of `data` reads its columns and needs those of its loss; it is read by the run's other keys.
    sources = []
    for number, source in enumerate(keys.data or ()):
        mapping = keys.column_mapping if source.column_mapping is None else source.column_mapping
        source_keys = keys.model_copy(update={"column_mapping": mapping})
        needs = None if loss is None else loss.for_source(number)
        sources.append(DataSource(source.path, "train", source_keys, split=source.split, loss=needs))
    return sources


def _verdict_sources(keys: DataKeys, loss: LossNeeds | None) -> list[DataSource]:
    return [
        *(
            DataSource(path, "test", keys, split=keys.test_data_split, loss=loss)
            for path in listed(keys.test_data_path)
        ),
        *(DataSource(path, "guard", keys, split=keys.guard_data_split, loss=loss) for path in listed(keys.guard_data)),
    ]


def load_run_data(keys: DataKeys, *, needs_dev: bool, divides: bool = False, loss: LossNeeds | None = None) -> RunData:
    """Read and check all data of a run.

    Args:
        needs_dev: Hold a dev set out where none is named.
        divides: Divide what is held out into a dev set and a test set where none is named of both.
        loss: Columns that the loss needs.

    Raises:
        DataError: No training data is named, or any data is missing or broken, or is searched in another way than
            `retrieval_mode` says, or training rows hold judged pairs and `leak` refuses that.
    """
    # 1. The training rows. All paths are looked at before the first row is read, which may take minutes.
    refuse_missing_data(keys)
    sources = _training_sources(keys, loss)
    paths, parts = [source.path for source in sources], [source.records() for source in sources]
    loaded = _joined(parts, paths)
    if keys.source_batches == "single":  # each batch is of one source, so each source must teach something by itself
        for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
            _refuse_alike(part, path, None if loss is None else loss.for_source(number))
    else:
        _refuse_alike(loaded, " and ".join(paths), loss)
    records, notes = loaded.table, list(loaded.notes)

    # 2. The sets that are named. Only they can leak: what is held out shares no query or positive with the rest.
    dev = None
    if keys.val_data_path is not None:
        source = DataSource(keys.val_data_path, "validation", keys, split=keys.val_data_split, loss=loss)
        dev = source.judged(takes_pairs=True)
    test, further = _read_verdict_sets(keys, loss)
    named = {"dev": dev, "test": test, **further}
    compared = {name: task for name, task in named.items() if task is not None}
    judged = JudgedSets(compared, records) if compared else None
    untrained: dict[str, NDArray[np.int64]] = {}  # what rows are for that aren't trained on -> their sources
    if judged is not None and keys.leak != "warn":
        leaking = _leaking_rows(judged.overlaps(records), records, compared, refuses=keys.leak == "refuse")
        if leaking:
            untrained["left out (leak: drop)"] = records.sources[leaking]
            records = records.subset(np.delete(np.arange(len(records)), leaking))

    # 3. The held-out sets, of what is left: rows that leak into a named test set are out by now.
    if dev is None and needs_dev:
        fraction = None if keys.val_fraction == "auto" else keys.val_fraction
        train_rows, held_out, hold_out_notes = hold_out(records, fraction=fraction)
        notes += hold_out_notes
        halves = divide(records, held_out) if divides and test is None else None
        if halves is None:
            dev = held_out_task(records, train_rows, held_out, keys.label_kind)
            untrained["dev"] = records.sources[held_out]
        else:
            dev, test = (
                held_out_task(records, train_rows, half, keys.label_kind, name=f"held-out {name}")
                for half, name in zip(halves, ("dev", "test"), strict=True)
            )
            for half, name in zip(halves, ("dev", "test"), strict=True):
                untrained[name] = records.sources[half]
            notes.append("They are divided by content: one half chooses the checkpoint, the other gives the verdict.")
        records = records.subset(train_rows)
    notes += () if dev is None or dev.grades else resolution_notes(len(dev.queries))

    # 4. Counts and directions, after rows were left out and held out: the numbers are those of what is trained on.
    counts = RecordCounts.of(records, sources[0].image_limits)
    counts.items.require(keys.retrieval_mode, " and ".join(paths))
    tasks = {name: task for name, task in (named | {"dev": dev, "test": test}).items() if task is not None}
    any_pictures = counts.items.has_pictures
    for name, task in tasks.items():
        items = ItemCounts.of(task)
        any_pictures |= items.has_pictures
        if further_role(name) != "guard":  # those may be of any kind
            items.require(keys.retrieval_mode, task.name)
        notes += task.notes
    if keys.image_root is not None and not any_pictures:
        notes.append("image_root has no effect: the data hold no pictures.")

    # 5. Hashes.
    whole, hashes = hashlib.sha256(records.fingerprint.encode()), {"training": records.fingerprint}
    for name, task in tasks.items():
        hashes[name] = content_hash(task, whole)
    # Equal by content, not by path: a copy of the dev set gives no verdict of its own either.
    if divides and hashes.get("test") in (None, hashes["dev"]):
        which = "the test set is the dev set" if test else "no test set"
        more = f" (half of {2 * ENOUGH_QUERIES} or more held-out queries would be one)" if "dev" in untrained else ""
        notes.append(
            f"{which}{more}: the verdict is on the rows that choose the checkpoint; give other test_data_path."
        )

    descriptions: dict[str, str] = {}
    per_source = {use: np.bincount(rows, minlength=len(parts)).tolist() for use, rows in untrained.items()}
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        end = f" {number + 1}" if len(parts) > 1 else ""  # the labels of several sources are numbered
        lines = describe_source(path, part, parts={use: rows[number] for use, rows in per_source.items()})
        descriptions |= {f"{label}{end}": line for label, line in lines.items()}
    return RunData(
        records=records,
        dev=dev,
        test=test,
        notes=tuple(notes),
        counts=counts,
        fingerprint=whole.hexdigest(),
        hashes=hashes,
        num_invalid=loaded.num_invalid,
        sources=tuple(paths),
        read=descriptions,
        further=further,
        judged=judged,
        overlaps={} if judged is None else judged.overlaps(records),
    )


def _joined(parts: Sequence[LoadedRecords], paths: Sequence[str]) -> LoadedRecords:
    """Return the records of all sources as one; which columns were ignored stands in what was read, not in notes."""
    parts = [
        replace(part, notes=tuple(note for note in part.notes if note not in part.columns.notes)) for part in parts
    ]
    if len(parts) == 1:
        return parts[0]
    notes = tuple(f"{path}: {note}" for path, part in zip(paths, parts, strict=True) for note in part.notes)
    table = RecordTable.joined([part.table for part in parts])
    return LoadedRecords(table, notes, sum(part.num_invalid for part in parts))


def _refuse_alike(loaded: LoadedRecords, path: str, loss: LossNeeds | None) -> None:
    """Refuse records that are all alike in what the loss learns from: one class, one score, one positive.

    Every document would then be as right as any other, and the loss would be 0 from the first step.

    Raises:
        DataError: Names the file, the column and what to do.
    """
    table, takes = loaded.table, ("positives",) if loss is None else loss.takes
    if len(table) < 2:  # one row is refused later, in better words
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


def further_role(folder: str) -> Literal["test", "guard"]:
    """Return the role of a further set, with which the folder of its results begins."""
    return "guard" if folder.startswith("guard-") else "test"


def _read_verdict_sets(keys: DataKeys, loss: LossNeeds | None) -> tuple[RetrievalData | None, dict[str, RetrievalData]]:
    """Return the test set of the verdict, and the other test sets and the guard sets; repeated names become paths."""
    sources = _verdict_sources(keys, loss)
    tasks = [source.judged(takes_pairs=True) for source in sources]
    num_of_name = Counter(task.name for task in tasks)
    for number, source in enumerate(sources):
        if num_of_name[tasks[number].name] > 1:
            whole = redact(f"{source.path}/{source.split}" if source.split else source.path)
            tasks[number] = replace(tasks[number], name=whole)
    test = tasks[0] if keys.test_data_path else None
    others = list(zip(sources, tasks, strict=True))[0 if test is None else 1 :]
    return test, {f"{source.role}-{number}": task for number, (source, task) in enumerate(others, start=1)}


def _leaking_rows(
    overlaps: Mapping[str, Overlap], records: RecordTable, tasks: Mapping[str, RetrievalData], *, refuses: bool
) -> list[int]:
    """Return the rows that hold a judged query with an answer.

    Raises:
        DataError: There are some and they are refused, or no other row is left.
    """
    names_of = {
        row: tasks[name].name for name, overlap in overlaps.items() for rows in overlap.trained.values() for row in rows
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


def content_hash(task: RetrievalData, whole: hashlib._Hash | None = None) -> str:
    """Return the hash (hex) of a set's queries, documents, judgements and limits, whatever it is called.

    Args:
        whole: Hash of several sets, which is fed the same bytes: pictures are read once for both.
    """
    digest = hashlib.sha256()
    for line in _content_lines(task):
        digest.update(line)
        if whole is not None:
            whole.update(line)
    return digest.hexdigest()


def _content_lines(task: RetrievalData) -> Iterator[bytes]:
    for part in (task.queries, task.documents, task.qrels):
        for key, value in part.items():
            content: object = value  # a text, or judgements; of a picture what it shows, wherever it lies
            if isinstance(value, Composed):
                first, *more = (content_id(image) for image in value.images)
                content = {"picture": first, "text": value.text} | ({"further": more} if more else {})
            elif isinstance(value, Image):
                content = {"picture": content_id(value)}
            yield json.dumps((key, content)).encode()
        yield b"\n"
    # Parts that most sets don't have are left out when they are empty, so that their hash is that of older versions.
    if task.grades:
        yield json.dumps([task.kind, *task.grades.items()]).encode()
    for limits in (task.excluded, task.candidates):
        if limits:
            yield json.dumps([(query, sorted(ids)) for query, ids in limits.items()]).encode()


def record_texts(records: RecordTable) -> Iterator[str]:
    """Yield every text of the records, for tokenizers that are trained on them; pictures are passed over."""
    for record in records:
        for item in (record.query, *record.positives, *record.negatives):
            if not isinstance(item, Image):
                yield item.text if isinstance(item, Composed) else item
