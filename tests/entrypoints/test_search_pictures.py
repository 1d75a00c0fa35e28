"""`vembed search` on pictures: found by text, by picture and by both, in the terminal and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import PIL.Image
import pytest
from kit.balls import COLOURS, ball, caption
from search_cases import served_here
from vision_language_cases import write_vision_language

import vembed
from vembed.batch import Composed, Image
from vembed.models.from_scratch import TinyClip

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("colour", sorted(COLOURS))
def test_a_text_finds_its_picture_and_a_picture_itself(
    call: Any, picture_index: Path, tmp_path: Path, colour: str
) -> None:
    by_text = call("search", picture_index, caption(colour), "-k", "2")
    assert by_text.code == 0, by_text.err
    lines = by_text.out.splitlines()
    assert len(lines) == 4
    assert lines[0].split()[0::2] == ["1", f"{colour}.png"]
    assert lines[1] == "    (picture)", "the path is the id, and there is no caption"
    path = tmp_path / "query.webp"
    path.write_bytes(ball(colour, "WEBP"))
    by_picture = call("search", picture_index, "--image", path, "-k", "1", "--json")
    content = json.loads(by_picture.out)
    assert content["query_image"] == str(path)
    assert content["hits"][0] | {"score": 0} == {
        "rank": 1, "id": f"{colour}.png", "score": 0, "text": "", "image": f"{colour}.png",
    }  # fmt: skip


def test_every_form_of_a_picture_finds_the_same(picture_index: Path, balls: Path) -> None:
    path = balls / "blue.png"
    forms = [path, path.read_bytes(), PIL.Image.open(path), Image(str(path))]
    found = vembed.open_index(picture_index).search(forms, k=4)
    assert {hits[0].id for hits in found} == {"blue.png"}
    assert len({tuple(round(hit.score, 4) for hit in hits) for hits in found}) == 1


def test_a_picture_and_a_text_are_one_query(call: Any, clip: Path, picture_index: Path, balls: Path) -> None:
    done = call("search", picture_index, caption("green"), "--image", balls / "red.png", "--json")
    content = json.loads(done.out)
    assert (content["query"], content["query_image"]) == (caption("green"), str(balls / "red.png"))
    assert {hit["id"] for hit in content["hits"][:2]} == {"red.png", "green.png"}
    both = vembed.load(clip).encode([Composed((Image(str(balls / "red.png")),), caption("green"))], "query")
    assert content["hits"][0]["score"] == pytest.approx(max(both[0] @ vembed.open_index(picture_index).index.vector(row)
                                                            for row in range(4)), abs=1e-5)  # fmt: skip


def test_paths_and_captions_stand_below_the_id(call: Any, clip: Path, balls: Path, tmp_path: Path) -> None:
    rows = [{"_id": f"d{number}", "image": f"{name}.png", "caption": f"{name}\x1b[31m \u202e ball"}
            for number, name in enumerate(COLOURS)]  # fmt: skip
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vembed.build_index(clip, tmp_path / "c.jsonl", tmp_path / "index", image_root=balls)
    done = call("search", tmp_path / "index", caption("blue"), "-k", "1")
    assert done.out.splitlines()[0].endswith("  d2")
    assert done.out.splitlines()[1] == r"    blue.png: blue\x1b[31m \u202e ball"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b"just text", "no picture of a known format"),
        (ball("red", "JPEG")[:-300], "can't be decoded"),
    ],
)
def test_a_query_that_is_no_picture_is_refused(
    call: Any, picture_index: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "query.png"
    if content is not None:
        path.write_bytes(content)
    refused = call("search", picture_index, "--image", path)
    assert refused.code == 3
    assert f"{path}: " in refused.err
    assert message in refused.err
    path.write_bytes(ball("red"))
    assert call("search", picture_index, "--image", path).code == 0


def test_several_pictures_are_one_query(call: Any, balls: Path, picture_index: Path, tmp_path: Path) -> None:
    model, index = write_vision_language(tmp_path / "model", "qwen3_vl"), tmp_path / "index"
    assert call("encode", model, "--data", balls, "--output", index).code == 0
    paths = [balls / "red.png", balls / "blue.png"]
    words = [word for path in paths for word in ("--image", path)]
    done = call("search", index, "both", *words, "--json")
    content = json.loads(done.out)
    assert (content["query"], content["query_image"]) == ("both", [str(path) for path in paths])
    asked = Composed(tuple(Image(str(path)) for path in paths), "both")
    (hits,) = vembed.open_index(index).search([asked])
    assert [(hit["id"], hit["score"]) for hit in content["hits"]] == [(hit.id, hit.score) for hit in hits]
    refused = call("search", picture_index, *words)
    assert refused.code == 3
    assert "takes one picture in an item" in refused.err


def test_what_the_model_or_the_page_can_not_take_is_refused(
    call: Any, index: Path, picture_index: Path, balls: Path
) -> None:
    refused = call("search", index, "--image", balls / "red.png")
    assert refused.code == 2
    assert "takes texts: search it with a text" in refused.err
    both = call("search", index, "apple", "--image", balls / "red.png")
    assert both.code == 2
    assert "give the picture or the text alone" in both.err
    served = call("search", picture_index, "--image", balls / "red.png", "--serve")
    assert served.code == 2
    assert "leave out the query, --image and --json" in served.err
    capped = call("search", picture_index, "--image", balls / "red.png", "--max-image-pixels", "100")
    assert capped.code == 3
    assert "over the limit of 100" in capped.err


def test_examples_are_of_the_corpus_and_of_what_the_model_takes(index: Path, picture_index: Path) -> None:
    searcher = vembed.open_index(index)
    assert searcher.example_queries() == [
        "red apples grow on trees",
        "the train leaves at noon",
        "a recipe for apple pie",
    ]
    assert vembed.open_index(picture_index).example_queries() == [], "pictures without captions give no words"
    assert len(vembed.open_index(picture_index).example_rows()) == 3


def test_a_model_of_pictures_only_is_searched_by_picture(
    call: Any, clip: Path, balls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyClip, "modalities", frozenset({"image"}))
    vembed.build_index(clip, balls, tmp_path / "index")
    refused = call("search", tmp_path / "index", caption("red"))
    assert refused.code == 2
    assert "takes pictures: search it with --image PATH" in refused.err
    found = call("search", tmp_path / "index", "--image", balls / "red.png", "-k", "1")
    assert found.code == 0
    assert "red.png" in found.out
    with served_here(tmp_path / "index") as page:
        _, text, _ = page.get()
        assert 'id="q"' not in text, "there is no field that nothing could read"
        assert text.count("<select") == 1
        status, asked, _ = page.get("?q=red")
        assert status == 400
        assert "takes pictures, but no texts" in asked
        assert page.post(ball("red"), k=1)[0] == 200
