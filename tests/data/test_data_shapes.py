"""builtin:shapes: captions are read back by a parser of their own, and must say exactly what was drawn."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import pytest

from vembed.batch import Image, content_id
from vembed.data.builtin import load_builtin, load_builtin_retrieval, shapes
from vembed.data.builtin.shapes import BACKGROUNDS, COLOURS
from vembed.data.read import read

if TYPE_CHECKING:
    from vembed.data.builtin.shapes import Scene
    from vembed.data.keys import Role
    from vembed.data.table import RecordTable

ROLES: list[Role] = ["train", "validation", "test"]
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
def drawn() -> tuple[dict[Role, RecordTable], float]:
    """All splits, and the seconds of processor time that drawing them took."""
    started = time.process_time()
    tables = {role: shapes.load(role).table for role in ROLES}
    return tables, time.process_time() - started


@pytest.fixture(scope="module")
def tables(drawn: tuple[dict[Role, RecordTable], float]) -> dict[Role, RecordTable]:
    return drawn[0]


@pytest.mark.slow
def test_all_splits_are_drawn_within_seconds(drawn: tuple[dict[Role, RecordTable], float]) -> None:
    tables, seconds = drawn
    assert [len(tables[role]) for role in ROLES] == [6000, 500, 1000]
    assert seconds < 10


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
    assert len(read("builtin:shapes", "validation").records().table) == 500
    assert len(load_builtin("shapes", "dev").table) == 500
    task = read("builtin:shapes", "test").judged()
    assert task.name == "shapes/test"
    assert len(task.documents) == 1000
    assert all(isinstance(item, Image) for item in task.documents.values())
    assert load_builtin_retrieval("stdlib-code", "dev") is None
