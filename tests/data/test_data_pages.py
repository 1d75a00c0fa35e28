"""builtin:pages: every page is read back from its pixels, and must answer its questions and no other."""

from __future__ import annotations

import hashlib
import time
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import PIL.ImageFont
import pytest

from vembed.batch import Image, content_id
from vembed.data.builtin import load_builtin, pages
from vembed.data.builtin.pages import COLUMNS, KINDS, LINES, SCALE, Line
from vembed.data.read import read
from vembed.data.table import LoadedRecords

if TYPE_CHECKING:
    from vembed.data.keys import Role

ROLES: list[Role] = ["train", "validation", "test"]


@pytest.fixture(scope="module")
def glyphs() -> dict[bytes, str]:
    """The pixels of each word in the font, and the word."""
    font = PIL.ImageFont.load_default_imagefont()
    found = {}
    for word in (*KINDS, *pages.ADJECTIVES, *pages.NOUNS):
        mask = np.array(font.getmask(word, "1")).reshape(font.getmask(word).size[::-1]) > 0
        found[np.packbits(np.pad(mask, ((0, 0), (0, 64 - mask.shape[1])))).tobytes()] = word
    assert len(found) == len(KINDS) + 80, "no two words look alike"
    return found


def read_page(picture: Image, glyphs: dict[bytes, str]) -> list[Line]:
    """Read the table of a page."""
    pixels = ~np.asarray(PIL.Image.open(BytesIO(picture.read())))
    assert (pixels == np.kron(pixels[::SCALE, ::SCALE], np.ones((SCALE, SCALE), dtype=bool))).all()
    pixels = np.pad(pixels[::SCALE, ::SCALE], ((0, 0), (0, 64)))
    lines = []
    for row in range(LINES):
        top = 16 * row + 18
        cells = (pixels[top : top + 11, left : left + width] for left, width in zip(COLUMNS, (48, 64, 64), strict=True))
        cells = (np.pad(cell, ((0, 0), (0, 64 - cell.shape[1]))) for cell in cells)
        lines.append(Line(*(glyphs[np.packbits(cell).tobytes()] for cell in cells)))
    return lines


@pytest.mark.slow
def test_pages_answer_their_own_questions_and_no_line_stands_twice(glyphs: dict[bytes, str]) -> None:
    started = time.process_time()
    tables = {role: pages.load(role).table for role in ROLES}
    assert time.process_time() - started < 10
    assert [len(tables[role]) for role in ROLES] == [8000, 500, 1000]
    seen: set[Line] = set()
    words: dict[Role, set[str]] = {}
    for role, table in tables.items():
        words[role] = set()
        for start in range(0, len(table), LINES):
            records = table.take(range(start, start + LINES))
            (picture,) = {record.positives for record in records}
            assert isinstance(picture[0], Image)
            lines = read_page(picture[0], glyphs)
            for line, record in zip(lines, records, strict=True):
                assert isinstance(record.query, str)
                assert set(line) <= set(record.query.replace(",", "").split())
                assert record.query == pages.question_of(line)
            assert not seen & set(lines)
            assert len({line.kind for line in lines}) == LINES
            seen.update(lines)
            words[role].update(word for line in lines for word in line)
    assert len(seen) == 9500
    assert words["train"] >= words["test"] | words["validation"]


def test_bytes_are_the_same_on_every_machine() -> None:
    """Nothing but Python's sha256 and Pillow's own font makes them; Pillow has had this font since 1996."""
    digest = hashlib.sha256()
    for number, lines in enumerate(pages.pages_of("test")):
        digest.update(pages.draw_page(lines, number))
        digest.update(" ".join(map(pages.question_of, lines)).encode())
    assert digest.hexdigest() == "42066b46013cd470ad88255709a39cc386f2bdc8ea99ba4f30ab2dcd6e37a489"


def test_each_question_searches_all_pages_of_its_split() -> None:
    task = read("builtin:pages", "test").judged()
    assert (len(task.queries), len(task.documents)) == (1000, 200)
    assert all(list(grades.values()) == [1] for grades in task.qrels.values())
    dev = load_builtin("pages", "dev")
    assert isinstance(dev, LoadedRecords)
    assert content_id(dev.table[0].positives[0]) == content_id(dev.table[4].positives[0])
