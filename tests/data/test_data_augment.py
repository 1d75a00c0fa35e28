"""Augmentation: a function of the picture and its seed, and the seed one of (run, epoch, record, place)."""

import io
import itertools
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from vembed.batch import Augmentation, Composed, Image, ImageLimits, Strength, content_id
from vembed.data.augment import LEAST_SIDE, SMALL_SIDE, augmented, augmented_record
from vembed.data.collate import collate
from vembed.data.images import decode_image
from vembed.data.table import Record

LIMITS = ImageLimits()
SEEDS = range(60)


def noise(width: int = 40, height: int = 30, seed: int = 0) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def encoded(picture: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def pixels(image: Image) -> bytes:
    picture = decode_image(image, LIMITS)
    return np.asarray(picture).tobytes() + bytes(str(picture.size), "ascii")


def changed(picture: PIL.Image.Image, strength: Strength, seed: int, *, flip: bool = False) -> PIL.Image.Image:
    return augmented(picture, Augmentation(strength, flip, seed))


def record(*, label: str | None = None) -> Record:
    """Return a record with the same picture in every place."""
    image = Image("a.png", encoded(noise()))
    return Record(image, (image, Composed((image,), "in red"), "a text"), (image,), label, "rows:1")


def images_of(one: Record) -> list[Image]:
    items = (one.query, *one.positives, *one.negatives)
    return [item.images[0] if isinstance(item, Composed) else item for item in items if not isinstance(item, str)]


@pytest.mark.parametrize("strength", ["light", "strong"])
def test_equal_augmentations_give_equal_pixels_and_other_seeds_give_others(strength: Strength) -> None:
    data = encoded(noise(160, 120))

    def of(seed: int) -> bytes:
        return pixels(Image("a", data, Augmentation(strength, False, seed)))

    assert [of(seed) for seed in SEEDS] == [of(seed) for seed in SEEDS]
    assert len({of(seed) for seed in SEEDS}) > 50


def test_each_place_of_each_record_in_each_epoch_is_changed_in_its_own_way() -> None:
    augmentation = Augmentation("strong", flip=False, seed=7)
    seen = [
        image.augmentation
        for row, epoch in itertools.product(range(5), range(3))
        for image in images_of(augmented_record(record(), augmentation, row=row, epoch=epoch))
    ]
    assert len(seen) == 5 * 3 * 4
    assert len(set(seen)) == len(seen)
    other = augmented_record(record(), Augmentation("strong", flip=False, seed=8), row=0, epoch=0)
    assert not {image.augmentation for image in images_of(other)} & set(seen)
    one, same = (augmented_record(record(), augmentation, row=2, epoch=1) for _ in range(2))
    assert one == same


def test_each_picture_of_an_item_is_changed_in_its_own_way() -> None:
    image = Image("a.png", encoded(noise()))
    augmentation = Augmentation("strong", flip=False, seed=7)
    one, two = (
        augmented_record(
            Record(Composed((image,) * count, ""), ("text",), (), None, "rows:1"), augmentation, row=0, epoch=0
        )
        for count in (1, 2)
    )
    assert isinstance(one.query, Composed)
    assert isinstance(two.query, Composed)
    assert two.query.images[0] == one.query.images[0]
    assert len({each.augmentation for each in (*two.query.images, image)}) == 3


def test_texts_and_the_order_of_items_stay() -> None:
    before, after = record(), augmented_record(record(), Augmentation("light", flip=False, seed=0), row=0, epoch=0)
    assert after.positives[2] == "a text"
    assert isinstance(after.positives[1], Composed)
    assert after.positives[1].text == "in red"
    assert (len(after.positives), len(after.negatives)) == (len(before.positives), len(before.negatives))
    assert [image.data for image in images_of(after)] == [image.data for image in images_of(before)]


def test_none_leaves_the_record_as_it_is_and_a_flip_alone_only_mirrors() -> None:
    assert augmented_record(record(), Augmentation("none", flip=False, seed=0), row=0, epoch=0) == record()
    picture = noise()
    mirrored = picture.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    results = [changed(picture, "none", seed, flip=True).tobytes() for seed in SEEDS]
    assert set(results) == {picture.tobytes(), mirrored.tobytes()}
    assert 15 < results.count(mirrored.tobytes()) < 45


def left_half_white(width: int = 60, height: int = 40) -> PIL.Image.Image:
    picture = PIL.Image.new("RGB", (width, height), "black")
    picture.paste("white", (0, 0, width // 2, height))
    return picture


def is_mirrored(picture: PIL.Image.Image) -> bool:
    grey = np.asarray(picture.convert("L"), dtype=float)
    half = grey.shape[1] // 2
    return bool(grey[:, :half].mean() < grey[:, -half:].mean())


@pytest.mark.parametrize("strength", ["light", "strong"])
def test_left_stays_left_unless_a_flip_is_asked_for(strength: Strength) -> None:
    assert not any(is_mirrored(changed(left_half_white(), strength, seed)) for seed in SEEDS)
    flipped = [is_mirrored(changed(left_half_white(), strength, seed, flip=True)) for seed in SEEDS]
    assert 15 < sum(flipped) < 45


@pytest.mark.parametrize(("strength", "least", "most"), [("light", 0.8, 1.0), ("strong", 0.6, 1.2)])
def test_the_window_has_the_stated_area_and_the_shape_of_the_picture(
    strength: Strength, least: float, most: float
) -> None:
    picture = noise(300, 200)
    areas = []
    for seed in SEEDS:
        width, height = changed(picture, strength, seed).size
        assert width / height == pytest.approx(1.5, abs=0.02)
        areas.append(width * height / (300 * 200))
    assert least - 0.02 < min(areas) < least + 0.1
    assert most - 0.1 < max(areas) < most + 0.02


def test_light_shows_an_untouched_piece_of_the_picture_and_the_edge_colour_beyond() -> None:
    picture = noise(100, 80)
    picture.paste((250, 240, 230), (0, 0, 100, 5))  # most of the edge has one colour
    for box in ((0, 75, 100, 80), (0, 0, 5, 80), (95, 0, 100, 80)):
        picture.paste((250, 240, 230), box)
    known = {colour for _, colour in picture.getcolors(10**6) or []}
    beyond = 0
    for seed in SEEDS:
        window = changed(picture, "light", seed)
        assert {colour for _, colour in window.getcolors(10**6) or []} <= known
        inside = any(
            window.crop((8, 8, 40, 40)).tobytes() == picture.crop((x + 8, y + 8, x + 40, y + 40)).tobytes()
            for x, y in itertools.product(range(-8, 20), range(-8, 20))
        )
        assert inside
        beyond += window.getpixel((0, 0)) == (250, 240, 230)
    assert beyond


@pytest.mark.parametrize("size", [SMALL_SIDE // 2, SMALL_SIDE * 2])
def test_strong_turns_by_up_to_15_degrees(size: int) -> None:
    picture = PIL.Image.new("RGB", (size, size), "white")
    picture.paste("black", (0, size // 2 - 2, size, size // 2 + 2))  # a level line
    angles = []
    for seed in SEEDS:
        grey = np.asarray(changed(picture, "strong", seed).convert("L"), dtype=float)
        dark = grey < (grey.min() + grey.max()) / 2
        rows, columns = np.nonzero(dark)
        angles.append(np.degrees(np.arctan(np.polyfit(columns, rows, 1)[0])))
    assert max(map(abs, angles)) < 15.5
    assert min(angles) < -10
    assert max(angles) > 10
    for seed in range(5):
        level = np.asarray(changed(picture, "light", seed).convert("L"), dtype=float)
        middle = level[:, size // 4 : -size // 4]  # beyond the edge there is no line
        assert middle.std() > 0
        assert (middle == middle[:, :1]).all()


def test_strong_makes_some_grey_and_keeps_most_colours() -> None:
    picture = PIL.Image.new("RGB", (64, 64), (200, 60, 60))
    colours = [np.asarray(changed(picture, "strong", seed))[32, 32].astype(int) for seed in range(300)]
    grey = [colour for colour in colours if colour.max() - colour.min() <= 1]
    assert 15 <= len(grey) <= 50
    coloured = np.array([colour for colour in colours if colour.max() - colour.min() > 1])
    assert (coloured.argmax(axis=1) == 0).mean() > 0.95, "red stays red"
    assert len({tuple(colour) for colour in coloured.tolist()}) > 200
    white = PIL.Image.new("RGB", (64, 64), "white")
    for seed in range(20):
        pixel = np.asarray(changed(white, "strong", seed))[32, 32]
        assert pixel.max() - pixel.min() <= 2, "what has no colour gets none"


def test_strong_blurs_some() -> None:
    picture = noise(200, 200)

    def roughness(seed: int) -> float:
        grey = np.asarray(changed(picture, "strong", seed).convert("L"), dtype=float)
        return float(np.abs(np.diff(grey, axis=1)).mean() / grey.std())

    rough = np.array([roughness(seed) for seed in range(100)])
    assert 5 <= (rough < 0.6 * np.median(rough)).sum() <= 35


def test_a_large_picture_is_made_smaller_first_and_never_too_small() -> None:
    for width, height, factor in ((3 * LEAST_SIDE, 2 * LEAST_SIDE, 2), (2 * LEAST_SIDE, 2 * LEAST_SIDE - 1, 1)):
        shorter = min(changed(PIL.Image.new("RGB", (width, height)), "light", 1).size)
        assert 0.89 * height / factor <= shorter <= height / factor
        assert shorter >= 0.89 * LEAST_SIDE


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (3, 2)])
@pytest.mark.parametrize("strength", ["light", "strong"])
def test_tiny_pictures_are_no_trouble(size: tuple[int, int], strength: Strength) -> None:
    for seed in range(20):
        assert min(changed(noise(*size), strength, seed).size) >= 1


def test_the_identity_of_a_picture_is_that_of_its_file_however_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(noise()))
    plain, other = Image(str(path)), Image(str(path), None, Augmentation("light", False, 1))
    assert content_id(plain) == content_id(other)
    assert plain != other
    assert pixels(plain) != pixels(other)
    batch = collate([augmented_record(record(), Augmentation("light", flip=False, seed=0), row=0, epoch=0)], [0])
    ids = [*batch.query_ids_Q.tolist(), batch.document_ids_D[0], batch.document_ids_D[3]]
    assert len(set(ids)) == 1, "copies of a positive are still known as such"
