"""Sets that code makes: what they hold is read back from pixels and words, and is the same on every machine."""

import ast
import hashlib
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageFont
import pytest

from vembed.batch import Image, content_id
from vembed.data.builtin import load_builtin, load_builtin_retrieval, pages, shapes, stdlib_code
from vembed.data.builtin.pages import COLUMNS, KINDS, LINES, SCALE, Line
from vembed.data.builtin.shapes import BACKGROUNDS, COLOURS, Scene
from vembed.data.keys import Role
from vembed.data.read import DataSource
from vembed.data.table import LoadedRecords, RecordTable
from vembed.errors import DataError

# builtin:pages: every page must answer its questions and no other


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
        kind, first, second = (glyphs[np.packbits(cell).tobytes()] for cell in cells)
        lines.append((kind, first, second))
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
            assert len({line[0] for line in lines}) == LINES
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
    task = DataSource("builtin:pages", "test").judged()
    assert (len(task.queries), len(task.documents)) == (1000, 200)
    assert all(list(grades.values()) == [1] for grades in task.qrels.values())
    dev = load_builtin("pages", "dev")
    assert isinstance(dev, LoadedRecords)
    assert content_id(dev.table[0].positives[0]) == content_id(dev.table[4].positives[0])


# builtin:shapes: captions are read by a parser of their own, and must say exactly what was drawn


THING = re.compile(r"\ban? (?:(small|large) )?(red|orange|yellow|green|blue|purple|pink|black) (\w+)")

RELATION = re.compile(r"left of|right of|above|below")

PLACE = re.compile(r"at the ((?:top|bottom)(?: left| right)?|left|right)\b")

BACKGROUND = re.compile(r"on an? (\w+) background$")


def is_true(caption: str, scene: Scene) -> bool:
    """Judge a caption from its words alone: the slow reference of the judgements."""
    words = THING.findall(caption)
    background = BACKGROUND.search(caption)
    if (background and background[1] != scene.background) or len(words) != len(scene.things):
        return False
    if len(words) == 2:
        relation = RELATION.search(caption)
        assert relation is not None
        if relation[0] in {"right of", "below"}:
            words.reverse()
        if {"right of": "left of", "below": "above"}.get(relation[0], relation[0]) != scene.place:
            return False
    else:
        place = PLACE.search(caption)
        assert place is not None
        if place[1] != scene.place:
            return False
    return all(
        (shape, colour) == (thing.shape, thing.colour) and size in {"", thing.size}
        for (size, colour, shape), thing in zip(words, scene.things, strict=True)
    )


@pytest.fixture(scope="module")
def tables() -> dict[Role, RecordTable]:
    """All splits, drawn within seconds of processor time."""
    started = time.process_time()
    drawn = {role: shapes.load(role).table for role in ROLES}
    assert time.process_time() - started < 10
    assert [len(drawn[role]) for role in ROLES] == [6000, 500, 1000]
    return drawn


@pytest.mark.slow
def test_no_caption_picture_or_combination_is_in_two_splits(tables: dict[Role, RecordTable]) -> None:
    captions = {role: {record.query for record in table} for role, table in tables.items()}
    pictures = {
        role: {content_id(item) for record in table for item in (*record.positives, *record.negatives)}
        for role, table in tables.items()
    }
    combinations = {
        role: {(frozenset((t.shape, t.colour) for t in scene.things), scene.place) for scene in shapes.scenes_of(role)}
        for role in ROLES
    }
    for of in (captions, pictures, combinations):
        for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
            assert of[one]
            assert of[one].isdisjoint(of[other])  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_two_scenes_of_a_split_are_alike_and_the_parts_are_all_used(tables: dict[Role, RecordTable]) -> None:
    for role in ROLES:
        scenes = shapes.scenes_of(role)
        assert len(set(scenes)) == len(scenes) == shapes.NUM_SCENES[role]
        assert {len(scene.things) for scene in scenes} == {1, 2}
        assert len({record.positives[0].read() for record in tables[role]}) == len(scenes)  # type: ignore[union-attr]
    scenes = shapes.scenes_of("train")
    assert {thing.colour for scene in scenes for thing in scene.things} == set(COLOURS)
    assert {scene.place for scene in scenes} == {*shapes.PLACES, *shapes.RELATIONS}
    assert {scene.background for scene in scenes} == set(BACKGROUNDS)


@pytest.mark.slow
def test_each_caption_is_true_of_its_picture_and_false_of_its_hard_negative(tables: dict[Role, RecordTable]) -> None:
    for role in ROLES:
        captions = iter(record.query for record in tables[role])
        for scene in shapes.scenes_of(role):
            for _ in range(shapes.NUM_CAPTIONS[role]):
                caption = next(captions)
                assert isinstance(caption, str)
                assert is_true(caption, scene), caption
                assert not is_true(caption, shapes.swapped_scene(scene)), caption


def test_the_hard_negative_has_the_same_shapes_and_colours() -> None:
    kinds = Counter()
    for scene in shapes.scenes_of("train"):
        other = shapes.swapped_scene(scene)
        for part in ("shape", "colour", "size"):
            assert sorted(getattr(t, part) for t in scene.things) == sorted(getattr(t, part) for t in other.things)
        kinds[
            len(scene.things), {t.shape + t.colour for t in scene.things} == {t.shape + t.colour for t in other.things}
        ] += 1
    assert min(kinds.values()) > 500, kinds
    assert len(kinds) == 3, "one object moved; two objects swapped; two colours swapped"


@pytest.mark.slow
def test_captions_of_a_scene_differ_and_there_are_many_forms(tables: dict[Role, RecordTable]) -> None:
    captions = [record.query for record in tables["train"]]
    assert all(first != second for first, second in zip(captions[::2], captions[1::2], strict=True))
    forms = {RELATION.sub("R", THING.sub("T", BACKGROUND.sub("B", str(text)))) for text in captions}
    assert len(forms) > 10


@pytest.mark.parametrize("role", ["validation", "test"])
def test_the_judgements_name_every_picture_that_a_caption_describes(role: Role) -> None:
    task = shapes.load_retrieval(role)
    scenes = shapes.scenes_of(role)
    by_name = dict(zip(task.documents, scenes, strict=True))
    queries = list(task.queries.items())[:: 8 if role == "test" else 2]
    for name, caption in queries:
        assert isinstance(caption, str)
        assert set(task.qrels[name]) == {document for document, scene in by_name.items() if is_true(caption, scene)}
    assert len(task.documents) == shapes.NUM_SCENES[role]
    assert max(len(grades) for grades in task.qrels.values()) > 1, "some captions must be ambiguous"
    assert all(task.qrels[name] for name in task.queries)


def test_a_picture_shows_its_objects_where_they_are() -> None:
    for scene in shapes.scenes_of("validation"):
        with PIL.Image.open(BytesIO(shapes.draw_scene(scene))) as picture:
            assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (64, 64))
            pixels = np.asarray(picture).astype(int)
        centres = []
        for thing in scene.things:
            rows, columns = np.nonzero(np.abs(pixels - COLOURS[thing.colour]).sum(axis=-1) < 20)
            assert len(rows) > 20
            centres.append((columns.mean() - 32, rows.mean() - 32))
        if len({thing.colour for thing in scene.things}) < len(scene.things):
            continue
        if scene.place == "left of":
            assert centres[0][0] + 15 < centres[1][0]
        elif scene.place == "above":
            assert centres[0][1] + 15 < centres[1][1]
        else:
            assert tuple(np.sign(value) if abs(value) > 6 else 0 for value in centres[0]) == shapes.PLACES[scene.place]
        corner = tuple(pixels[0, 0])
        assert corner == BACKGROUNDS[scene.background or ""]


@pytest.mark.slow
def test_another_process_draws_the_same(tables: dict[Role, RecordTable]) -> None:
    code = "from vembed.data.builtin.shapes import load; print(load('validation').table.fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tables["validation"].fingerprint


def test_the_set_is_reached_by_name() -> None:
    assert len(DataSource("builtin:shapes", "validation").records().table) == 500
    assert len(load_builtin("shapes", "dev").table) == 500
    task = DataSource("builtin:shapes", "test").judged()
    assert task.name == "shapes/test"
    assert len(task.documents) == 1000
    assert all(isinstance(item, Image) for item in task.documents.values())
    assert load_builtin_retrieval("stdlib-code", "dev") is None


# builtin:stdlib-code: docstrings of the standard library and the functions below them


SPLITS = ("train", "dev", "test")


@pytest.mark.slow
def test_splits_share_no_content_and_no_module() -> None:
    tables = {split: load_builtin("stdlib-code", split).table for split in SPLITS}
    assert sum(len(table) for table in tables.values()) > 3000
    seen: dict[str, str] = {}
    for split, table in tables.items():
        assert len(table) > 200
        for record in table:
            module = record.location.partition(":")[0].partition("/")[0].removesuffix(".py")
            for text in (f"module {module}", record.query.strip(), *(text.strip() for text in record.positives)):
                assert seen.setdefault(text, split) == split
    queries = [record.query for table in tables.values() for record in table]
    assert len(queries) == len(set(queries))


@pytest.mark.slow
def test_a_pair_is_a_docstring_and_its_masked_source() -> None:
    table = load_builtin("stdlib-code", "train").table
    (record,) = [one for one in table if one.query == "Raise GeneratorExit inside generator."]
    document = record.positives[0]
    assert document.startswith("def FUNC(self):\n    try:")
    assert "close" not in document
    assert "Raise GeneratorExit" not in document
    assert record.location.startswith("_collections_abc.py:")
    assert record.negatives == ()


@pytest.mark.slow
def test_locations_are_the_functions_that_they_name() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    for record in load_builtin("stdlib-code", "test").table.take(list(range(0, 200, 20))):
        file, _, line = record.location.rpartition(":")
        assert re.match(r"\s*(async )?def \w+\(", (root / file).read_text("utf-8").splitlines()[int(line) - 1])


@pytest.mark.slow
def test_no_tests_and_no_installed_packages_are_read() -> None:
    files = {
        record.location.partition(":")[0] for split in SPLITS for record in load_builtin("stdlib-code", split).table
    }
    assert "json/decoder.py" in files
    assert not [
        f for f in files if re.search(r"(^|/)(test|tests|idle_test|site-packages|__pycache__|test_\w+\.py)(/|$)", f)
    ]


SOURCE = '''
class A:
    async def run_all(self, x):
        """Run everything that waits.

        More words.
        """
        # a comment stays
        await self.run_all(x)
        return rerun_all(x)

    def short(self):
        """Return nothing of interest."""
        return None

    def terse(self):
        """Two words."""
        a = 1
        return a

    def same_line(self): """Three words here."""; return 1

    def only_docstring(self):
        """Does nothing at all."""
'''


def test_what_makes_a_pair() -> None:
    (pair,) = stdlib_code.pairs_of(SOURCE, "a.py")
    assert pair.query == "Run everything that waits."
    assert pair.document == (
        "async def FUNC(self, x):\n    # a comment stays\n    await self.FUNC(x)\n    return rerun_all(x)"
    )
    assert pair.line == 3
    ast.parse(pair.document)


def test_files_that_do_not_parse_are_counted(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(SOURCE)
    (tmp_path / "copy.py").write_text(SOURCE)
    (tmp_path / "old.py").write_text("print 'python 2'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/more.py").write_text(SOURCE.replace("everything", "something"))
    read_uncached = stdlib_code.read_library.__wrapped__  # the cache holds the real library
    pairs, num_unparsed, num_duplicates = read_uncached(str(tmp_path))
    assert (len(pairs), num_unparsed, num_duplicates) == (1, 1, 1)


def test_role_and_split_name_the_same_part() -> None:
    by_role = DataSource("builtin:stdlib-code", "validation").records()
    by_split = DataSource("builtin:stdlib-code", "train", split="dev").records()
    assert by_role.table.fingerprint == by_split.table.fingerprint
    assert by_role.table.fingerprint != DataSource("builtin:stdlib-code", "test").records().table.fingerprint


def test_as_retrieval_each_docstring_searches_the_bodies_of_its_split() -> None:
    task = DataSource("builtin:stdlib-code", "test").judged()
    count = len(load_builtin("stdlib-code", "test").table)
    assert task.name == "stdlib-code/test"
    assert len(task.queries) == len(task.documents) == len(task.qrels) == count
    assert f"{count:,} of" in task.notes[0]


def test_an_unknown_set_or_split_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'stdlib-code'"):
        DataSource("builtin:stdlib_code", "train").records()
    with pytest.raises(DataError, match="it has: train, dev, test"):
        DataSource("builtin:stdlib-code", "train", split="trian").records()
