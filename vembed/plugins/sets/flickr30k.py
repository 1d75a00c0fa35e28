"""Flickr30k: 31,783 photographs with 5 captions each, a text-to-image set.

The folder holds the captions in one of two forms and the pictures, as they are published:

    dataset_flickr30k.json      Karpathy's form: images[] of {"filename", "split", "sentences": [{"raw"}, ...]}
    flickr30k-images/NAME.jpg   (or flickr30k_images/, or images/)

or, where there is no JSON file, the original captions with lists of which picture is in which split:

    results_20130124.token      lines `NAME.jpg#0<tab>caption`
    train.txt, val.txt, test.txt    a picture a line, with or without .jpg

A training record is a caption and its picture, 5 records for a picture; the copies of a picture in a batch have equal
content and are never negatives. As a task every caption is a query, and its picture is what is relevant. In Karpathy's
form 29,000 pictures are for training, 1,014 for validation and 1,000 for the test.

Source: Young et al., 2014, "From image descriptions to visual denotations"; the splits of Karpathy & Fei-Fei, 2015.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.data.check import encoding_fault, text_fault
from vembed.data.json_lines import json_object
from vembed.data.judged import RetrievalData
from vembed.data.lines import text_rows
from vembed.data.presets import Preset
from vembed.data.raw_rows import Unreadable
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vembed.batch import Image, Item
    from vembed.data.presets import PresetSource

JSON_FILE = "dataset_flickr30k.json"
TOKEN_FILE = "results_20130124.token"
PICTURE_FOLDERS = ("flickr30k-images", "flickr30k_images", "images")

CUTOFFS = (1, 5, 10)
"""Ranks at which both directions are reported."""


class _Photo(NamedTuple):
    name: str
    captions: list[str]
    image: Image
    file: str
    number: int


def load(source: PresetSource, split: str) -> LoadedRecords:
    """Return a record for each caption of a split.

    Raises:
        DataError: A file is missing or broken, or the split holds nothing.
    """
    writer = RecordWriter()
    for photo in _photos(source, split):
        for caption in photo.captions:
            writer.add(caption, positives=[photo.image], file=photo.file, line=photo.number)
    return LoadedRecords(writer.finish(), source.log.notes(), source.log.count)


def load_retrieval(source: PresetSource, split: str) -> RetrievalData:
    """Return a split as a task: captions search pictures. Ids are the file names, and `NAME#0` to `NAME#4`.

    Raises:
        DataError: A file is missing or broken, or the split holds nothing.
    """
    documents: dict[str, Item] = {}
    queries: dict[str, Item] = {}
    qrels: dict[str, dict[str, int]] = {}
    for photo in _photos(source, split):
        documents[photo.name] = photo.image
        for number, caption in enumerate(photo.captions):
            queries[f"{photo.name}#{number}"] = caption
            qrels[f"{photo.name}#{number}"] = {photo.name: 1}
    return RetrievalData(f"flickr30k/{split}", queries, documents, qrels, source.log.notes(), cutoffs=CUTOFFS)


def _photos(source: PresetSource, split: str) -> list[_Photo]:
    """Return the usable photographs of a split, in the order of the file."""
    # Either form gives (file, line, name, captions); where both lie in the folder, Karpathy's comes first.
    (captions_file,), folder = source.find_parts([(JSON_FILE, TOKEN_FILE)], PICTURE_FOLDERS)
    listed = (_of_json if captions_file.name == JSON_FILE else _of_lists)(source, captions_file, split)
    photos: dict[str, _Photo] = {}
    for file, number, name, captions in listed:
        where = f"{file}:{number} ({name})"
        if name in photos:
            source.log.add(where, "the picture is given twice", column="filename")
            continue
        image = source.picture(f"{folder}/{name}" if folder else name, where=where, column="filename")
        if image is not None:
            photos[name] = _Photo(name, captions, image, file, number)
    source.check()
    if not photos:
        raise DataError(f"{source.label} has no pictures of split {split!r} in {captions_file.name}")
    return list(photos.values())


def _of_json(source: PresetSource, path: Path, split: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield (file, number of the picture from 1, name, captions) of Karpathy's form."""
    entries = json_object(path).get("images")
    if not isinstance(entries, list):
        raise DataError(f"{path.name}: expected a list of pictures in 'images'")
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            source.log.add(f"{path.name}:{number}", f"expected an object, got {type(entry).__name__}")
        elif entry.get("split") == split:
            name = entry.get("filename")
            if fault := text_fault(name):
                source.log.add(f"{path.name}:{number}", fault, column="filename")
                continue
            captions = _captions(entry.get("sentences"))
            if isinstance(captions, str):
                source.log.add(f"{path.name}:{number} ({name})", captions, column="sentences")
            else:
                yield path.name, number, str(name), captions


def _captions(sentences: Any) -> list[str] | str:
    """Return the captions of a picture, or the reason why there are none."""
    if not isinstance(sentences, list) or not sentences:
        return "expected a list of sentences"
    captions: list[str] = []
    for number, sentence in enumerate(sentences, start=1):
        caption = sentence.get("raw") if isinstance(sentence, dict) else None
        reason = text_fault(caption)
        if reason:
            return f"{reason} in 'raw' (sentence {number} of {len(sentences)})"
        captions.append(str(caption))
    return captions


def _of_lists(source: PresetSource, path: Path, split: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield (file, line, name, captions) of the pictures that a split's list names."""
    (list_file,), _ = source.find_parts([(f"{split}.txt",)])
    # The captions of all splits, 158,915 short texts: the file isn't sorted by split, and is read once.
    captions: dict[str, list[str]] = {}
    for line, row in text_rows(path):
        if not isinstance(row, Unreadable) and not row["text"]:
            continue
        key, tab, caption = ("", "", "") if isinstance(row, Unreadable) else row["text"].partition("\t")
        name = key.rpartition("#")[0]
        if not tab or not name or not caption.strip() or encoding_fault(key + caption):
            reason = row if isinstance(row, Unreadable) else "expected NAME.jpg#NUMBER, a tab and a caption"
            source.log.add(f"{path.name}:{line}", reason)
        else:
            captions.setdefault(name, []).append(caption.strip())
    for line, row in text_rows(list_file):
        if isinstance(row, Unreadable):
            source.log.add(f"{list_file.name}:{line}", row)
        elif row["text"]:
            name = row["text"] if row["text"].endswith(".jpg") else f"{row['text']}.jpg"
            if name in captions:
                yield list_file.name, line, name, captions[name]
            else:
                source.log.add(f"{list_file.name}:{line}", f"{name!r} has no caption in {path.name}")


PRESET = Preset(("train", "val", "test"), load, load_retrieval, fallbacks={}, refused={})
