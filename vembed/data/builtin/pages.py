"""`builtin:pages`: find the page that answers a question about one of its lines; short registers, rendered here.

1. A line names something: "inn | brave otter". A hash of the line decides its split, and no line stands on two pages: a
   question has one page, and what is asked in a test was never read in training. Its words were.
2. A page takes the next line of each of some kinds, in order of their hashes, and shows them as a table.
3. The text is drawn with Pillow's own bitmap font in black and white, and stored without compression: neither FreeType
   nor zlib has a part in the bytes, which are equal on every machine.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, TypeAlias

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from vembed.batch import Image
from vembed.data.builtin import BuiltinSet, hash_of, role_by_hash
from vembed.data.keys import SPLIT_NAMES
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.text import plural

if TYPE_CHECKING:
    from vembed.data.keys import Role

NUM_PAGES: dict[Role, int] = {"train": 1600, "validation": 100, "test": 200}
LINES = 5  # of a page

KINDS = ("inn", "ship", "club", "shop", "band", "mill", "team", "farm")
ADJECTIVES = (
    "amber", "bold", "brave", "bright", "calm", "clever", "cold", "crimson", "daring", "dusty", "early",
    "fierce", "frozen", "gentle", "giant", "golden", "green", "happy", "hidden", "hollow", "humble", "iron",
    "jolly", "late", "lonely", "lucky", "merry", "noble", "old", "proud", "quick", "quiet", "royal", "rusty",
    "silent", "silver", "sleepy", "velvet", "wild", "young",
)  # fmt: skip
NOUNS = (
    "acorn", "anchor", "badger", "barrel", "beaver", "candle", "castle", "compass", "cuckoo", "dragon",
    "eagle", "falcon", "feather", "fiddle", "fox", "garden", "goose", "hammer", "harp", "heron", "island",
    "kettle", "lantern", "lion", "maple", "meadow", "needle", "oak", "orchard", "otter", "parrot", "pepper",
    "pigeon", "rabbit", "raven", "saddle", "sparrow", "thistle", "tiger", "walnut",
)  # fmt: skip
QUESTIONS = (
    "which page has the {kind} {adjective} {noun}",
    "where is the {kind} called {adjective} {noun}",
    "find the {adjective} {noun}, a {kind}",
)

SCALE = 2
"""Pixels a side of each pixel of the font: models that were trained on scans can read it."""

SIZE = (192, 112)
"""Width and height of a page in pixels of the font; a line takes 16 of them, and a letter 6 x 11."""

COLUMNS = (16, 64, 128)
"""Left edges of kind, adjective and noun, in pixels of the font."""

# Pillow's bitmap font, decoded once for all pages. A TrueType font needs FreeType, whose pixels differ by version.
FONT = lru_cache(maxsize=1)(PIL.ImageFont.load_default_imagefont)


Line: TypeAlias = tuple[str, str, str]
"""One line of a register: kind, adjective, noun."""


def load(role: Role) -> LoadedRecords:
    """Return one split: a question about each line of each page -> the page."""
    name = f"pages/{SPLIT_NAMES[role][0]}"
    writer = RecordWriter()
    pages = pages_of(role)
    for number, lines in enumerate(pages):
        page = Image(f"{name}/{number}.bmp", draw_page(lines, number))
        for line in lines:
            writer.add(question_of(line), positives=[page], file=name, line=number + 1)
    size = f"{SCALE * SIZE[0]} x {SCALE * SIZE[1]} pixels"
    facts = f"{name}: {plural(len(writer), 'question')} about {plural(len(pages), 'page')} rendered here, {size}."
    return LoadedRecords(writer.finish(), (facts,))


@lru_cache(maxsize=3)
def pages_of(role: Role) -> tuple[tuple[Line, ...], ...]:
    """Return the lines of each page of a split."""
    of_kind = {}
    for kind in KINDS:
        lines = itertools.product([kind], ADJECTIVES, NOUNS)
        of_split = (line for line in lines if role_by_hash(f"split|{' '.join(line)}") == role)
        of_kind[kind] = iter(sorted(of_split, key=_hash))
    pages = []
    for number in range(NUM_PAGES[role]):
        # A page starts one kind later than the one before: 5 of the 8 kinds, and all kinds are used up alike.
        kinds = [KINDS[(number + offset) % len(KINDS)] for offset in range(LINES)]
        pages.append(tuple(sorted((next(of_kind[kind]) for kind in kinds), key=_hash)))
    return tuple(pages)


def question_of(line: Line) -> str:
    """Return the question that a line answers, in one of several forms."""
    kind, adjective, noun = line
    return QUESTIONS[_hash(line, "question") % len(QUESTIONS)].format(kind=kind, adjective=adjective, noun=noun)


def draw_page(lines: tuple[Line, ...], number: int) -> bytes:
    """Draw a page as a black and white BMP."""
    canvas = PIL.Image.new("1", SIZE, 1)
    pen = PIL.ImageDraw.Draw(canvas)
    font = FONT()
    pen.text((COLUMNS[0], 2), "REGISTER", fill=0, font=font)
    pen.text((COLUMNS[2], 2), f"page {number + 1}", fill=0, font=font)
    pen.line((COLUMNS[0], 14, SIZE[0] - COLUMNS[0], 14), fill=0)
    for row, line in enumerate(lines):
        for left, word in zip(COLUMNS, line, strict=True):
            pen.text((left, 16 * row + 18), word, fill=0, font=font)
    buffer = BytesIO()
    canvas.resize((SCALE * SIZE[0], SCALE * SIZE[1]), PIL.Image.Resampling.NEAREST).save(buffer, "BMP")
    return buffer.getvalue()


def _hash(line: Line, purpose: str = "order") -> int:
    return hash_of(f"{purpose}|{' '.join(line)}")


SET = BuiltinSet(load, holds_pictures=True)
