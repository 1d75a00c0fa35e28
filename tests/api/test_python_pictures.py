"""`import vembed` with pictures: every form they come in, the same vectors, and what is refused before encoding."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from kit.balls import COLOURS, ball, bomb, caption

import vembed
from vembed.batch import Composed, Image


def opened(content: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(content))


def test_every_form_of_a_picture_gives_the_same_vector(clip: Path, balls: Path) -> None:
    path = balls / "red.png"
    forms = [path, path.read_bytes(), PIL.Image.open(path), Image(str(path)), Image("x", path.read_bytes())]
    vectors = vembed.load(clip).encode(forms, side="document")
    assert vectors.shape == (5, 32)
    np.testing.assert_allclose(vectors, np.tile(vectors[0], (5, 1)), atol=1e-6)
    other = vembed.load(clip).encode([balls / "blue.png"], side="document")
    assert np.abs(vectors[0] - other[0]).max() > 0.1


def test_texts_pictures_and_both_stand_in_one_list_in_order(clip: Path, balls: Path) -> None:
    model = vembed.load(clip)
    rows: list[Any] = []
    for colour in COLOURS:
        path = balls / f"{colour}.png"
        rows += [caption(colour), path, Composed((Image(str(path)),), caption(colour))]
    mixed = model.encode(rows, side="query", batch_size=2)
    alone = np.concatenate([model.encode([row], side="query") for row in rows])
    np.testing.assert_allclose(mixed, alone, atol=1e-5)
    texts, pictures = mixed[0::3], mixed[1::3]
    assert (np.argmax(texts @ pictures.T, axis=1) == np.arange(len(COLOURS))).all()
    assert model.takes == {"text", "image", "image+text"}
    assert model.encode([], side="query").shape == (0, 32)


def test_a_picture_with_a_text_takes_the_picture_in_every_form(clip: Path, balls: Path) -> None:
    path, model = balls / "red.png", vembed.load(clip)
    forms: list[Any] = [Image(str(path)), path, path.read_bytes(), PIL.Image.open(path)]
    rows = [Composed((form,), "in red") for form in forms]
    rows.append(Composed([path], "in red"))  # type: ignore[arg-type]  # a list serves as well
    vectors = model.encode(rows, side="query")
    np.testing.assert_allclose(vectors, np.tile(vectors[0], (5, 1)), atol=1e-6)
    with pytest.raises(vembed.VembedError, match="no such file"):
        model.encode([Composed((balls / "none.png",), "in red")], side="query")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"row 1: a picture of Composed is a pathlib.Path, .*, not a str"):
        model.encode(["red", Composed((str(path),), "in red")], side="query")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "YCbCr"])
def test_a_picture_of_pillow_is_read_as_its_file_would_be(clip: Path, mode: str, tmp_path: Path) -> None:
    picture = opened(ball("green")).convert(mode)
    saved = tmp_path / "saved.tiff"
    picture.save(saved)
    vectors = vembed.load(clip).encode([picture, saved], side="document")
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-3)


def test_a_turned_photograph_is_upright_in_every_form(clip: Path, tmp_path: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    opened(ball("red")).crop((0, 0, 60, 64)).save(path, exif=exif, quality=100)
    vectors = vembed.load(clip).encode([path, PIL.Image.open(path)], side="document")
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


def test_what_is_no_picture_is_named_before_anything_is_encoded(
    clip: Path, balls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vembed.load(clip)
    good = balls / "red.png"
    (tmp_path / "text.png").write_text("no picture")
    wrong: dict[Any, str] = {
        tmp_path / "nothing.png": "nothing.png: no such file",
        tmp_path: "not a regular file",
        tmp_path / "text.png": "text.png: no picture of a known format",
        b"": "row 1: the file is empty",
        bomb(): "row 1: 100,000 x 100,000 = 10,000,000,000 pixels are over the limit",
    }
    with monkeypatch.context() as patch:
        patch.setattr(model, "item_encoder", None)  # nothing may come so far
        for row, message in wrong.items():
            with pytest.raises(vembed.DataError, match=re.escape(message)):
                model.encode([good, row], side="document")
        with pytest.raises(vembed.DataError, match="row 1: pixels of mode 'F' have no stated range"):
            model.encode([good, PIL.Image.new("F", (4, 4))], side="document")
        cut = opened(ball("red", "JPEG")[:-300])
        with pytest.raises(vembed.DataError, match="row 1: the picture can't be read"):
            model.encode([good, cut], side="document")
    with pytest.raises(vembed.DataError, match="row 0: the JPEG can't be decoded"):
        model.encode([ball("red", "JPEG")[:-300]], side="document")
    assert model.encode([good, good], side="document").shape == (2, 32)


def test_the_cap_on_pixels_holds_for_every_form(clip: Path, balls: Path) -> None:
    path = balls / "red.png"
    model = vembed.load(clip, max_image_pixels=96 * 64 - 1)
    for row in (path, path.read_bytes(), PIL.Image.open(path)):
        with pytest.raises(vembed.DataError, match=r"6,143"):
            model.encode([row], side="document")
    assert vembed.load(clip, max_image_pixels=96 * 64).encode([path], side="document").shape == (1, 32)
    with pytest.raises(vembed.ConfigError, match="at least 1"):
        vembed.load(clip, max_image_pixels=0)


def test_rows_of_other_types_and_single_rows_are_type_errors(clip: Path, balls: Path) -> None:
    model = vembed.load(clip)
    with pytest.raises(TypeError, match="row 1 is a ndarray; every row is a text"):
        model.encode(["a", np.zeros((4, 4, 3))], side="document")  # type: ignore[list-item]
    for row in (balls / "red.png", b"x", PIL.Image.new("RGB", (4, 4)), Image("x")):
        with pytest.raises(TypeError, match="rows is one picture; give a list"):
            model.encode(row, side="document")  # type: ignore[arg-type]


def test_a_picture_for_a_model_of_texts_is_named(bag: Path, balls: Path) -> None:
    model = vembed.load(bag)
    with pytest.raises(vembed.DataError, match="takes texts, and row 1 is a picture"):
        model.encode(["apple", balls / "red.png"], side="query")
    assert model.takes == {"text"}


def test_evaluating_takes_pictures_from_an_image_root(clip: Path, balls: Path, tmp_path: Path) -> None:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    rows = {"corpus": [{"_id": name, "image": f"{name}.png"} for name in COLOURS],
            "queries": [{"_id": f"q-{name}", "text": caption(name)} for name in COLOURS]}  # fmt: skip
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    judged = "".join(f"q-{name}\t{name}\t1\n" for name in COLOURS)
    (folder / "qrels" / "test.tsv").write_text(judged)
    with pytest.raises(vembed.DataError, match="no such file"):
        vembed.evaluate(clip, folder)
    assert vembed.evaluate(clip, folder, image_root=balls).metrics["ndcg@10"] == 1.0
    assert vembed.evaluate(vembed.load(clip), folder, image_root=str(balls)).metrics["recall@1"] == 1.0
    with pytest.raises(vembed.DataError, match="over the limit of 100"):
        vembed.evaluate(vembed.load(clip, max_image_pixels=100), folder, image_root=balls)
