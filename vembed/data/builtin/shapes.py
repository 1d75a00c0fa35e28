"""`builtin:shapes`: find the picture that a caption describes; one or two coloured shapes, drawn here.

1. A scene is one object at a place of the picture, or two objects side by side or one above the other. An object has a
   shape, a colour and a size; the picture has a background.
2. Scenes fall into groups: a pair's shapes, colours and axis without regard to which is which, or an object and a place
   without regard to the side. A hash of the group decides the split, so that no caption stands in two splits, and a
   scene and its hard negative stand in one.
3. A split is the scenes of the smallest hashes. Each is drawn as a PNG and has captions, which may leave sizes and the
   background out but never an object, its shape or colour, or where it is.
4. The hard negative of a pair has its objects, or their colours, swapped; that of an object alone, the opposite place.

A caption that leaves things out describes several pictures truly: the judgements of the retrieval task name them all.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING

import PIL.Image
import PIL.ImageDraw

from vembed.batch import Image
from vembed.data.builtin import BuiltinSet, hash_of, role_by_hash
from vembed.data.images import content_name
from vembed.data.judged import RetrievalData
from vembed.data.keys import SPLIT_NAMES
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.data.keys import Role

SIDE = 64
"""Width and height of a picture, in pixels."""

OVERSAMPLING = 2
"""Pixels drawn for each pixel of a side: edges come out smooth."""

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
COLOURS = {
    "red": (214, 39, 40),
    "orange": (255, 140, 0),
    "yellow": (240, 210, 20),
    "green": (44, 150, 50),
    "blue": (30, 90, 220),
    "purple": (130, 50, 170),
    "pink": (245, 130, 190),
    "black": (20, 20, 20),
}
BACKGROUNDS = {"white": (255, 255, 255), "grey": (190, 190, 190), "beige": (238, 222, 190), "mint": (190, 240, 215)}
SIZES = {"small": 7, "large": 12}
"""Radius in pixels of the circle around a shape."""

NUM_SCENES: dict[Role, int] = {"train": 3000, "validation": 500, "test": 1000}
NUM_CAPTIONS: dict[Role, int] = {"train": 2, "validation": 1, "test": 1}
"""Scenes of a split, and captions of a scene."""

ALONE_SHARE = 5
"""Scenes for each one with a single object."""

PLACES = {
    "top left": (-1, -1),
    "top": (0, -1),
    "top right": (1, -1),
    "left": (-1, 0),
    "right": (1, 0),
    "bottom left": (-1, 1),
    "bottom": (0, 1),
    "bottom right": (1, 1),
}
"""Steps of a single object from the centre: right, down."""

RELATIONS = {"left of": "right of", "above": "below"}
"""Relation of the first object of a pair to the second, and of the second to the first."""

ALONE_TEMPLATES = ("just {a} at the {place}", "only {a} at the {place}", "nothing but {a} at the {place}")
PAIR_TEMPLATES = ("{a} {relation} {b}", "a picture of {a} {relation} {b}", "there is {a} {relation} {b}")
BACKGROUND_TEMPLATE = "{caption} on a {background} background"


@dataclass(frozen=True, slots=True)
class Thing:
    """An object; a size of None, in a caption, is any size."""

    shape: str
    colour: str
    size: str | None


@dataclass(frozen=True, slots=True)
class Scene:
    """Content of a picture, or of a caption."""

    things: tuple[Thing, ...]  # one object, or two: the left one or the upper one first
    place: str  # a key of `PLACES` for one object, of `RELATIONS` for two
    background: str | None  # a key of `BACKGROUNDS`; None, in a caption, is any background

    def described_by(self) -> Iterator[Scene]:
        """Yield every description that is true of this scene: with and without sizes, with and without background."""
        unsized = tuple(replace(thing, size=None) for thing in self.things)
        for things, background in itertools.product((self.things, unsized), (self.background, None)):
            yield Scene(things, self.place, background)


def load(role: Role) -> LoadedRecords:
    """Return one split: caption -> picture, with a picture that differs in one thing as the hard negative."""
    split = SPLIT_NAMES[role][0]
    scenes = scenes_of(role)
    writer = RecordWriter()
    for index, scene in enumerate(scenes):
        name = f"shapes/{split}"
        picture = Image(f"{name}/{index}.png", draw_scene(scene))
        swapped = Image(f"{name}/{index}-swapped.png", draw_scene(swapped_scene(scene)))
        for caption in captions_of(scene, NUM_CAPTIONS[role]):
            writer.add(caption, positives=[picture], negatives=[swapped], file=name, line=index + 1)
    facts = f"{name}: {plural(len(writer), 'caption')} of {plural(len(scenes), 'picture')} drawn here, 64 x 64 pixels."
    return LoadedRecords(writer.finish(), (facts,))


def load_retrieval(role: Role) -> RetrievalData:
    """Return one split as a retrieval task: each caption searches all pictures; all that it describes are relevant."""
    split = SPLIT_NAMES[role][0]
    documents: dict[str, Image] = {}
    shown: defaultdict[Scene, list[str]] = defaultdict(list)  # description -> pictures of which it is true
    for index, scene in enumerate(scenes_of(role)):
        picture = Image(f"shapes/{split}/{index}.png", draw_scene(scene))
        name = content_name(picture)
        documents[name] = picture
        for description in scene.described_by():
            shown[description].append(name)
    # Ids are hashes of content, so a caption that two scenes share is one query.
    described: dict[str, Scene] = {}
    for scene in scenes_of(role):
        described |= captions_of(scene, NUM_CAPTIONS[role])
    queries = {content_name(caption): caption for caption in described}
    qrels = {content_name(caption): dict.fromkeys(shown[says], 1) for caption, says in described.items()}
    return RetrievalData(f"shapes/{split}", queries, documents, qrels)


def scenes_of(role: Role) -> tuple[Scene, ...]:
    """Return the scenes of a split, no two alike, in order of their hashes."""
    return _splits()[role]


@lru_cache(maxsize=1)
def _splits() -> dict[Role, tuple[Scene, ...]]:
    """Return the scenes of each split: a pass over all 75,264 that there are takes a third of a second."""
    alone: defaultdict[Role, list[Scene]] = defaultdict(list)
    for shape, colour, size, place, background in itertools.product(SHAPES, COLOURS, SIZES, PLACES, BACKGROUNDS):
        scene = Scene((Thing(shape, colour, size),), place, background)
        alone[_role_of(scene)].append(scene)
    pairs: defaultdict[Role, list[Scene]] = defaultdict(list)
    things = [Thing(*attributes) for attributes in itertools.product(SHAPES, COLOURS, SIZES)]
    for first, second in itertools.product(things, things):
        if (first.shape, first.colour) == (second.shape, second.colour):
            continue  # their sizes alone would tell them apart, and captions may leave sizes out
        for place, background in itertools.product(RELATIONS, BACKGROUNDS):
            scene = Scene((first, second), place, background)
            pairs[_role_of(scene)].append(scene)
    splits = {}
    for role, wanted in NUM_SCENES.items():
        chosen = sorted(alone[role], key=_hash)[: wanted // ALONE_SHARE]
        chosen += sorted(pairs[role], key=_hash)[: wanted - len(chosen)]
        splits[role] = tuple(sorted(chosen, key=_hash))
    return splits


def captions_of(scene: Scene, count: int) -> dict[str, Scene]:
    """Return different captions of a scene, chosen by its hash, with the description that each puts into words.

    Args:
        count: Number of captions, at most 8.
    """
    # Choices are drawn until enough of them differ in words; a scene has 12 captions or more.
    captions: dict[str, Scene] = {}
    for number in itertools.count():
        caption, description = _caption(scene, _hash(scene, f"caption {number}"))
        captions.setdefault(caption, description)
        if len(captions) == count:
            break
    return captions


def swapped_scene(scene: Scene) -> Scene:
    """Return a scene of the same group of which no caption of this one is true."""
    if len(scene.things) == 1:
        right, down = PLACES[scene.place]
        opposite = next(place for place, steps in PLACES.items() if steps == (-right, -down))
        return replace(scene, place=opposite)
    # The same words in another order: a model that reads captions as bags of words can't tell the two apart.
    first, second = scene.things
    if first.colour != second.colour and _hash(scene, "swap") % 2:
        return replace(scene, things=(replace(first, colour=second.colour), replace(second, colour=first.colour)))
    return replace(scene, things=(second, first))


def draw_scene(scene: Scene) -> bytes:
    """Draw a scene as a PNG of `SIDE` x `SIDE` pixels, equal for equal scenes (with one version of Pillow)."""
    assert scene.background is not None, "a picture has a background"
    behind = BACKGROUNDS[scene.background]
    canvas = PIL.Image.new("RGB", (SIDE * OVERSAMPLING, SIDE * OVERSAMPLING), behind)
    pen = PIL.ImageDraw.Draw(canvas)
    for number, thing in enumerate(scene.things):
        assert thing.size is not None, "a drawn object has a size"
        if len(scene.things) == 1:
            right, down = PLACES[scene.place]
        else:
            step = 2 * number - 1
            right, down = (step, 0) if scene.place == "left of" else (0, step)
        # The centre moves by up to 2 pixels each way, so that a place is no constant.
        jitter = _hash(scene, f"jitter {number}")
        centre = 32 + 15 * right + jitter % 5 - 2, 32 + 15 * down + jitter // 5 % 5 - 2
        x, y, radius = (value * OVERSAMPLING for value in (*centre, SIZES[thing.size]))
        fill = COLOURS[thing.colour]
        if thing.shape in {"circle", "ring"}:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
            if thing.shape == "ring":
                hole = radius // 2
                pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=behind)
        elif thing.shape == "square":
            half = round(radius * 0.85)
            pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
        elif thing.shape == "cross":
            arm = radius // 3
            pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
            pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
        elif thing.shape == "triangle":
            pen.polygon(_corners(x, y, [radius] * 3), fill=fill)
        else:
            assert thing.shape == "star", thing.shape
            pen.polygon(_corners(x, y, [radius, round(radius * 0.4)] * 5), fill=fill)
    buffer = BytesIO()
    canvas.reduce(OVERSAMPLING).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _corners(x: int, y: int, radii: list[int]) -> list[tuple[float, float]]:
    """Return corners at equal angles, the first one on top."""
    angles = (2 * math.pi * corner / len(radii) for corner in range(len(radii)))
    return [
        (x + radius * math.sin(angle), y - radius * math.cos(angle))
        for angle, radius in zip(angles, radii, strict=True)
    ]


def _role_of(scene: Scene) -> Role:
    """Return the split of a scene's group, which its hard negative is in as well."""
    shapes = sorted(thing.shape for thing in scene.things)
    colours = sorted(thing.colour for thing in scene.things)
    place = scene.place
    if len(scene.things) == 1:
        place = min(place, swapped_scene(scene).place)
    return role_by_hash(f"{shapes} {colours} {place}")


def _hash(scene: Scene, purpose: str = "order") -> int:
    things = " ".join(f"{thing.shape} {thing.colour} {thing.size}" for thing in scene.things)
    return hash_of(f"{purpose}|{things}|{scene.place}|{scene.background}")


def _caption(scene: Scene, choice: int) -> tuple[str, Scene]:
    """Return a caption, chosen by the digits of `choice`, and the scene without what the caption leaves out."""
    # Three binary digits, and the rest, modulo the number of templates, is the template.
    choice, sized = divmod(choice, 2)
    choice, with_background = divmod(choice, 2)
    choice, backwards = divmod(choice, 2)
    things = scene.things if sized else tuple(replace(thing, size=None) for thing in scene.things)
    names = []
    for thing in things:
        words = f"{thing.size} {thing.colour}" if thing.size else thing.colour
        names.append(f"{'an' if words[0] in 'aeiou' else 'a'} {words} {thing.shape}")
    if len(things) == 1:
        text = ALONE_TEMPLATES[choice % len(ALONE_TEMPLATES)].format(a=names[0], place=scene.place)
    else:
        relation = RELATIONS[scene.place] if backwards else scene.place
        a, b = reversed(names) if backwards else names
        text = PAIR_TEMPLATES[choice % len(PAIR_TEMPLATES)].format(a=a, b=b, relation=relation)
    if with_background:
        text = BACKGROUND_TEMPLATE.format(caption=text, background=scene.background)
    return text, Scene(things, scene.place, scene.background if with_background else None)


SET = BuiltinSet(load, load_retrieval, holds_pictures=True)
