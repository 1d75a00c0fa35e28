"""CIRR: 36,554 queries of a picture and a text that says how the picture sought differs from it.

The folder holds the dataset's repository (branch `cirr_dataset`) and the pictures of NLVR2:

    captions/cap.rc2.{train,val}.json           a list of {"pairid", "reference", "target_hard", "caption",
                                                "img_set": {"members": [...]}}
    image_splits/split.rc2.{train,val}.json     picture name -> path, as "./dev/dev-244-0-img0.png"
    img_raw/{train,dev}/...                     the pictures (train/ and dev/ may also lie beside captions/)

The two folders of annotations may also lie in cirr/, as other projects arrange them. A training record is the reference
with its caption, and the target. As a task all pictures of the split are documents; the reference of a query is never
ranked for it. `val` is the public test: the targets of test1 are not published.

The split `val-subset` ranks, for each query, only the other members of the set of 6 similar pictures that its reference
is from: recall@1, 2 and 3 there are the literature's R_subset@k. On `val` recall@1, 5, 10 and 50 are its Recall@k.

Source: Liu et al., 2021, "Image Retrieval on Real-life Images with Pre-trained Vision-and-Language Models".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.batch import Composed
from vembed.data.check import text_fault
from vembed.data.formats import iter_rows
from vembed.data.json_lines import json_object
from vembed.data.judged import RetrievalData
from vembed.data.presets import Preset
from vembed.data.raw_rows import Unreadable
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Image, Item
    from vembed.data.presets import PresetSource

SUBSET = "-subset"
PICTURE_FOLDERS = {"train": "train", "val": "dev"}
"""Split -> the folder that the paths of its pictures begin with, as in NLVR2."""

CUTOFFS = (1, 5, 10, 50)
SUBSET_CUTOFFS = (1, 2, 3)
"""Ranks at which `val` and `val-subset` are reported, as in the literature."""


class _Pair(NamedTuple):
    id: str
    query: Composed
    target: Image
    reference_name: str
    target_name: str
    members: frozenset[str]
    line: int


class _Pictures:
    """The pictures of a split by name; one is checked when it is first asked for, and once.

    Args:
        file: JSON object of their paths by name.
        folder: Start of every path.
    """

    def __init__(self, source: PresetSource, file: Path, folder: str) -> None:
        self._source = source
        self._folder = folder
        self._paths: dict[str, Any] = json_object(file)
        self._known: dict[str, Image | None] = {}
        self.file_name = file.name

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def get(self, name: str) -> Image | None:
        """Return a picture of the split, or None where it was noted that there is none."""
        if name not in self._known:
            path = self._paths[name]
            where = f"{self.file_name} {name!r}"
            self._known[name] = None
            if isinstance(path, str):
                self._known[name] = self._source.picture(f"{self._folder}{path}", where=where, column="path")
            else:
                self._source.log.add(where, f"expected a path, got {type(path).__name__}")
        return self._known[name]

    def all(self) -> dict[str, Image]:
        """Return the usable pictures of the split, in the order of the file."""
        return {name: image for name in self._paths if (image := self.get(name)) is not None}


def load(source: PresetSource, split: str) -> LoadedRecords:
    """Return a record for each query of a split.

    Raises:
        DataError: A file is missing or broken.
    """
    file, pictures = _parts(source, split.removesuffix(SUBSET))
    writer = RecordWriter()
    for pair in _pairs(source, file, pictures):
        writer.add(pair.query, positives=[pair.target], file=file.name, line=pair.line)
    return LoadedRecords(writer.finish(), source.log.notes(), source.log.count)


def load_retrieval(source: PresetSource, split: str) -> RetrievalData:
    """Return a split as a task: a picture with a text searches the pictures of the split.

    Raises:
        DataError: A file is missing or broken.
    """
    of_subset = split.endswith(SUBSET)
    file, pictures = _parts(source, split.removesuffix(SUBSET))
    # All pictures of the split are searched, those that no query names included: so does the literature.
    documents: dict[str, Item] = dict(pictures.all())
    pairs = _pairs(source, file, pictures, needs_members=of_subset)
    ranked = "Only the other members of each query's set of similar pictures are ranked for it."
    return RetrievalData(
        name=f"cirr/{split}",
        queries={pair.id: pair.query for pair in pairs},
        documents=documents,
        qrels={pair.id: {pair.target_name: 1} for pair in pairs},
        notes=(*source.log.notes(), ranked if of_subset else "The picture of a query is never ranked for it."),
        excluded={pair.id: frozenset({pair.reference_name}) for pair in pairs},
        candidates={pair.id: pair.members for pair in pairs} if of_subset else {},
        cutoffs=SUBSET_CUTOFFS if of_subset else CUTOFFS,
    )


def _parts(source: PresetSource, split: str) -> tuple[Path, _Pictures]:
    """Return the captions of a split and its pictures."""
    names = (f"captions/cap.rc2.{split}.json", f"image_splits/split.rc2.{split}.json")
    # The paths begin with the folder of the split, as "./dev/...": what stands before it is the start of all paths.
    inner = PICTURE_FOLDERS[split]
    places = [(name, f"cirr/{name}") for name in names]
    (captions, paths), folder = source.find_parts(places, (f"img_raw/{inner}", inner))
    return captions, _Pictures(source, paths, folder.removesuffix(inner))


def _pairs(source: PresetSource, path: Path, pictures: _Pictures, *, needs_members: bool = False) -> list[_Pair]:
    """Return the usable queries of a split."""
    pairs: dict[str, _Pair] = {}  # by id: a judged query needs one that is its own
    for line, row in iter_rows(path):
        if isinstance(row, Unreadable):
            source.log.add(f"{path.name}:{line}", row)
            continue
        number = row.get("pairid")
        if isinstance(number, bool) or not isinstance(number, int):
            source.log.add(f"{path.name}:{line}", "missing, or not a whole number", column="pairid")
            continue
        where = f"{path.name} pairid {number}"
        if str(number) in pairs:
            source.log.add(where, "given twice", column="pairid")
            continue
        if (fault := _fault(row, pictures, needs_members=needs_members)) is not None:
            column, reason = fault
            source.log.add(where, reason, column=column)
            continue
        reference, target = pictures.get(row["reference"]), pictures.get(row["target_hard"])
        if reference is not None and target is not None:
            query = Composed((reference,), row["caption"])
            members = frozenset(_members(row))
            pairs[str(number)] = _Pair(str(number), query, target, row["reference"], row["target_hard"], members, line)
    source.check()
    if not pairs:
        raise DataError(f"{source.label} has no queries in {path.name}")
    return list(pairs.values())


def _fault(row: dict[str, Any], pictures: _Pictures, *, needs_members: bool) -> tuple[str, str] | None:
    """Return the column of a query that can't be used, and the reason; None when all can."""
    # Names alone; the pictures are looked at once the row is sound, as reading a header costs a file.
    for column in ("reference", "target_hard"):
        name = row.get(column)
        if not isinstance(name, str):
            return column, "missing, or no text"
        if name not in pictures:
            return column, f"{name!r:.80} is no picture of {pictures.file_name}"
    if row["reference"] == row["target_hard"]:
        return "target_hard", "is the reference itself"
    reason = text_fault(row.get("caption"))
    if reason:
        return "caption", reason if "caption" in row else "missing"
    if needs_members and row["target_hard"] not in _members(row):
        return "img_set", "its members don't hold the target"
    return None


def _members(row: dict[str, Any]) -> list[str]:
    """Return the names of the set of similar pictures that a query is from; none where it has no such set."""
    img_set = row.get("img_set")
    members = img_set.get("members") if isinstance(img_set, dict) else None
    return [name for name in members if isinstance(name, str)] if isinstance(members, list) else []


PRESET = Preset(
    ("train", "val", f"val{SUBSET}"),
    load,
    load_retrieval,
    fallbacks={"test": "val"},
    refused={"test1": "the targets of test1 are not published, its authors' server scores it; the public test is val"},
)
