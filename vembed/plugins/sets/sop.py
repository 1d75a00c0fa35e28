"""Stanford Online Products: 120,053 pictures of 22,634 products, an image-to-image set.

The folder is the published archive's own, `Stanford_Online_Products`:

    Ebay_train.txt, Ebay_test.txt   a header, then lines `image_id class_id super_class_id path`
    bicycle_final/, ... (12 folders)    the pictures, at the paths that the lists name

The products of training and test differ. A training record is a picture and the next one of its product, the last one's
next being the first, so that each picture is a query once and a positive once; the product is the record's class, and
pictures of one class in a batch are never negatives of each other. A product with one picture has no pair.

As a task every picture of a list is a query and a document; a query never finds itself, having the document's id. The
literature's "Recall@k" is the share of queries with a picture of their product among the first k: hit@k here, at 1, 10,
100 and 1,000. `recall@k` is the share of a product's pictures that were found. Lists of 1,000 for 60,502 queries take
several GB, and so 1,000 is left to `--metric hit@1000`.

Source: Song et al., 2016, "Deep Metric Learning via Lifted Structured Feature Embedding".
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from vembed.data.judged import RetrievalData
from vembed.data.lines import text_rows
from vembed.data.presets import Preset
from vembed.data.raw_rows import Unreadable
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.text import plural

if TYPE_CHECKING:
    from vembed.batch import Image, Item
    from vembed.data.presets import PresetSource

HEADER = ("image_id", "class_id", "super_class_id", "path")
CUTOFFS = (1, 10, 100)


class _Picture(NamedTuple):
    id: str
    product: int
    image: Image
    line: int


def load(source: PresetSource, split: str) -> LoadedRecords:
    """Return a record for each picture of a product that has two or more.

    Raises:
        DataError: A file is missing or broken, or no product has two pictures.
    """
    pictures, file = _pictures(source, split)
    products: defaultdict[int, list[_Picture]] = defaultdict(list)
    for picture in pictures:
        products[picture.product].append(picture)
    writer = RecordWriter()
    # A ring through the pictures of a product: each is a query once and a positive once.
    following = {
        one.id: other
        for ring in products.values()
        if len(ring) > 1
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True)
    }
    for picture in pictures:
        if picture.id in following:
            positive = following[picture.id].image
            writer.add(picture.image, positives=[positive], label=picture.product, file=file, line=picture.line)
    if not len(writer):
        raise DataError(f"{source.label}: no product of {file} has two pictures: there are no pairs")
    notes = list(source.log.notes())
    if alone := sum(len(ring) == 1 for ring in products.values()):
        notes.append(f"{plural(alone, 'product has', 'products have')} one picture and so no pair: left out.")
    return LoadedRecords(writer.finish(), tuple(notes), source.log.count)


def load_retrieval(source: PresetSource, split: str) -> RetrievalData:
    """Return a split as a task: every picture searches all others.

    Raises:
        DataError: A file is missing or broken.
    """
    pictures, _ = _pictures(source, split)
    items: dict[str, Item] = {picture.id: picture.image for picture in pictures}
    products: defaultdict[int, list[_Picture]] = defaultdict(list)
    for picture in pictures:
        products[picture.product].append(picture)
    # Quadratic in the pictures of a product, which are 5 on average.
    qrels = {
        picture.id: {other.id: 1 for other in products[picture.product] if other.id != picture.id}
        for picture in pictures
    }
    notes = (*source.log.notes(), "The literature's Recall@k of this set is hit@k here.")
    return RetrievalData(f"sop/{split}", items, items, qrels, notes, cutoffs=CUTOFFS)


def _pictures(source: PresetSource, split: str) -> tuple[list[_Picture], str]:
    """Return the usable pictures of a list, in its order, and the list's name."""
    (path,), _ = source.find_parts([(f"Ebay_{split}.txt",)])
    pictures: dict[str, _Picture] = {}
    for line, row in text_rows(path):
        where = f"{path.name}:{line}"
        if isinstance(row, Unreadable):
            source.log.add(where, row)
            continue
        # Split at spaces, the last cell whole: a path may hold some.
        cells = row["text"].split(maxsplit=len(HEADER) - 1)
        if not cells or (line == 1 and tuple(cells) == HEADER):
            continue
        reason = _fault(cells)
        if reason is None and cells[0] in pictures:
            reason = f"image_id {cells[0]} is given twice"
        if reason:
            source.log.add(where, reason)
            continue
        image = source.picture(cells[3], where=where, column="path")
        if image is not None:
            pictures[cells[0]] = _Picture(cells[0], int(cells[1]), image, line)
    source.check()
    if not pictures:
        raise DataError(f"{source.label} has no pictures in {path.name}")
    return list(pictures.values()), path.name


def _fault(cells: list[str]) -> str | None:
    """Return the reason why a line can't be used, or None."""
    if len(cells) != len(HEADER):
        return f"{plural(len(cells), 'column')}; expected {' '.join(HEADER)}"
    for name, cell in zip(HEADER[:3], cells[:3], strict=True):
        if not (cell.isascii() and cell.isdigit() and len(cell) < 19):
            return f"{name} {cell!r:.40} is not a whole number"
    return None


PRESET = Preset(
    ("train", "test"),
    load,
    load_retrieval,
    fallbacks={},
    refused={"validation": "leave val_data_path out, and whole products of the training pictures are held out"},
)
