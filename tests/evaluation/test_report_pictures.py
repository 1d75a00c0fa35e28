"""Pictures in a report: small copies inside the page, a box for a broken one, and nothing of the machine's folders."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import pytest
from kit.balls import ball
from kit.pages import HOSTILE, METRIC, Page, assert_sound, page, result, sample, shape

import vembed
from vembed.batch import Composed, Image, ImageLimits
from vembed.data.judged import RetrievalData
from vembed.evaluation.judge import verdict
from vembed.evaluation.report.run_report import build_page, write_report
from vembed.pages import pictures
from vembed.pages.html import render_html
from vembed.pages.markdown import render_markdown
from vembed.pages.page import Cell, Section, Table
from vembed.pages.pictures import picture_name, small_copies
from vembed.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Item
    from vembed.evaluation.report.inputs import RunReport

pytestmark = pytest.mark.usefixtures("drawn_once")


URI = "data:image/webp;base64,"


LIMITS = ImageLimits()


def saved(path: Path, size: tuple[int, int] = (72, 72), colour: object = (200, 30, 30), mode: str = "RGB") -> Image:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new(mode, size, colour).save(path, "PNG")
    return Image(str(path.resolve()))


def noise(seed: int, side: int) -> Image:
    """A picture that no encoder makes small."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return Image(f"noise-{seed}", buffer.getvalue())


def report_of(documents: dict[str, Item], queries: dict[str, Item] | None = None, **changes: object) -> RunReport:
    """The sample over other documents; each query finds the first three, and d3 is relevant to each as well."""
    task = replace(sample().task, documents=documents)
    task = replace(
        task, queries=queries or task.queries, qrels={query: {**task.qrels[query], "d3": 1} for query in task.queries}
    )
    return sample(task=task, bm25=None, **changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A page of four pictures, all of them whole."""
    return page(report_of(pictures_in(tmp_path_factory.mktemp("plain"))))


def opened(uri: str | None) -> PIL.Image.Image:
    assert uri is not None
    assert uri.startswith(URI)
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(uri.removeprefix(URI), validate=True)))
    assert picture.format == "WEBP"
    return picture.convert("RGB")


def pictures_in(folder: Path) -> dict[str, Item]:
    colours = {"d1": (200, 30, 30), "d2": (30, 200, 30), "d3": (30, 30, 200), "d4": (90, 90, 90)}
    return {name: saved(folder / "private" / f"{name}.png", colour=colour) for name, colour in colours.items()}


@pytest.fixture
def documents(tmp_path: Path) -> dict[str, Item]:
    return pictures_in(tmp_path)


def identifier(attributes: dict[str, str | None]) -> str:
    """The id that a picture's alternative text begins with."""
    return (attributes["alt"] or "").partition(", relevant to: ")[0]


def tiles(shown: Page) -> list[str]:
    """The text of each tile of the grids."""
    return [part.split("</li>")[0] for part in shown.source.split("<li class=")[1:] if part.startswith('"tile')]


def test_retrieved_pictures_stand_in_a_grid_with_rank_judgement_score_and_id(plain: Page) -> None:
    assert_sound(plain.source)
    first = [tile for tile in tiles(plain) if ">rank 1<" in tile and ">d1<" in tile]
    assert first
    for tile in first:
        assert "score 0.900" in tile
        assert "baseline: rank 1" in tile
        assert 'alt="d1, relevant to: where is the cat"' in tile
    assert any("✓ right" in tile for tile in first), "d1 is relevant to q1"
    assert any("✗ wrong" in tile for tile in first), "and to no other query"
    assert any("○ missed" in tile and 'alt="d4, relevant to: two birds"' in tile for tile in tiles(plain))
    source = next(img for img in plain.named("img") if identifier(img) == "d2")["src"]
    assert opened(source).getpixel((5, 5)) == (30, 200, 30)


def test_a_page_of_texts_has_neither_grid_nor_picture() -> None:
    shown = page(sample())
    assert not shown.named("img")
    assert not tiles(shown)
    assert "✓ right" in shown.text


def test_pictures_in_a_section_of_a_plugin_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.evaluation.report.SECTIONS", Registry("report section", {}))

    @vembed.register_section
    def gallery(report: RunReport) -> Section:
        return Section("gallery", "Gallery", [Table(["Picture"], [[Cell("red", pictures=[picture])]], title="Gallery")])

    picture = saved(tmp_path / "red.png")
    shown = page(sample())
    (image,) = shown.named("img")
    assert opened(image["src"]).getpixel((5, 5)) == (200, 30, 30)
    assert "can't be shown" not in shown.text


def test_a_query_is_shown_by_its_pictures_and_its_text(documents: dict[str, Item], tmp_path: Path) -> None:
    pictures: dict[str, Item] = {f"q{n}": saved(tmp_path / f"q{n}.png", colour=(n, n, n)) for n in range(1, 5)}
    shown = page(report_of(documents, pictures))
    in_headings = [attributes for tag, attributes, path in shown.elements if tag == "img" and "h4" in path]
    assert {identifier(attributes) for attributes in in_headings} == set(pictures)
    of_texts = page(report_of(dict(sample().task.documents), pictures))
    assert {identifier(attributes) for attributes in of_texts.named("img")} == set(pictures)
    assert not tiles(of_texts)

    parts = tuple(Image(f"{number}.png", ball(colour)) for number, colour in enumerate(("red", "blue")))
    composed: dict[str, Item] = {name: Composed(parts, f"in red {name}") for name in pictures}
    content = build_page(report_of(documents, composed))
    shown = Page(render_html(content))
    assert "in red q" in shown.text
    copies = [content.copies[part].uri for part in parts]
    assert [img["src"] for img in shown.named("img") if img["src"] in copies][:2] == copies
    assert "picture 0.png + picture 1.png, with: in red q" in render_markdown(content)


def test_texts_and_pictures_in_one_list_stand_in_rows(documents: dict[str, Item]) -> None:
    shown = page(report_of({**documents, "d2": "A dog ran fast."}))
    assert not tiles(shown)
    assert "A dog ran fast." in shown.text
    assert [img for img in shown.named("img") if identifier(img) == "d1"]
    assert "document d1" in shown.text


def test_a_copy_has_at_most_160_pixels_a_side_and_transparent_parts_are_white(tmp_path: Path) -> None:
    for size, expected in (((640, 320), (160, 80)), ((72, 40), (72, 40)), ((1, 2000), (1, 160))):
        (copy,) = small_copies([saved(tmp_path / "a.png", size)], LIMITS).values()
        assert (copy.width, copy.height) == opened(copy.uri).size == expected
    (copy,) = small_copies([saved(tmp_path / "a.png", colour=(0, 0, 0, 0), mode="RGBA")], LIMITS).values()
    assert opened(copy.uri).getpixel((3, 3)) == (255, 255, 255)


def broken(folder: Path, kind: str) -> Image:
    path, whole = folder / f"{kind}.png", noise(0, 64).read()
    if kind != "gone":
        path.write_bytes(whole[: len(whole) // 2] if kind == "half" else b"no picture")
    return Image(str(path))


@pytest.mark.parametrize("kind", ["gone", "half", "text"])
def test_a_picture_that_is_broken_by_now_gets_a_labelled_box_and_the_others_are_shown(
    tmp_path: Path, documents: dict[str, Item], plain: Page, kind: str
) -> None:
    shown = page(report_of({**documents, "d2": broken(tmp_path, kind)}))
    assert "Picture can't be shown: d2" in shown.text
    assert "1 of 4 could not be decoded" in shown.text
    assert {identifier(attributes) for attributes in shown.named("img")} == {"d1", "d3", "d4"}
    assert "can't be shown" not in plain.text
    assert "could not be decoded" not in plain.text
    del documents["d2"]
    assert "Picture not in the set: d2" in page(report_of(documents)).text
    assert page(report_of(pictures_in(tmp_path / "elsewhere"))).source == plain.source, "wherever they lie"


def test_the_limit_on_pixels_holds_for_the_report_too(documents: dict[str, Item]) -> None:
    for pixels, decoded in ((72 * 72 - 1, 0), (72 * 72, 4)):
        content = build_page(report_of(documents, image_limits=ImageLimits(max_pixels=pixels)))
        assert len(content.copies) == decoded


def test_a_picture_that_stands_on_the_page_often_is_decoded_once(
    documents: dict[str, Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Image] = []
    original = pictures.decode_image

    def counting(image: Image, limits: ImageLimits) -> PIL.Image.Image:
        decoded.append(image)
        return original(image, limits)

    monkeypatch.setattr(pictures, "decode_image", counting)
    shown = page(report_of(documents))
    assert len(decoded) == len(set(decoded)) == 4
    assert len(shown.named("img")) > 12


@pytest.mark.slow
def test_a_page_full_of_pictures_that_no_encoder_makes_small_stays_under_2_megabytes() -> None:
    ids = [f"q{number:03}" for number in range(40)]
    photos = [noise(number, 200) for number in range(10)]
    base, final = (
        result(
            name,
            {query: number / 40 for number, query in enumerate(order)},
            run={
                query: [(f"d{5 * number + place}", 0.9 - place / 10) for place in range(5)]
                for number, query in enumerate(ids)
            },
        )
        for name, order in (("a", ids), ("b", ids[::-1]))
    )
    task = RetrievalData(
        name="photos",
        queries={query: photos[number % 10] for number, query in enumerate(ids)},
        documents={f"d{number}": photos[number % 10] for number in range(202)},
        qrels={query: {"d200": 1, "d201": 1} for query in ids},
    )
    report = sample(task=task, baseline=base, final=final, bm25=None, verdict=verdict(base, final, METRIC))
    shown = page(report)
    assert len(shown.named("img")) == 15 * (1 + 5 + 2)
    sources = [attributes["src"] or "" for attributes in shown.named("img")]
    assert sum(map(len, sources)) <= pictures.PAGE_CHARACTERS
    assert sum(map(len, sources)) > pictures.PAGE_CHARACTERS // 4, "smaller than it need be"
    assert len(shown.source.encode()) < 2_000_000


def test_no_folder_of_this_machine_is_in_a_report_and_hostile_names_of_pictures_stay_inert(tmp_path: Path) -> None:
    named = {f"d{n} {text}": f"{text.replace('/', '_')}.png" for n, text in enumerate(HOSTILE)}
    documents: dict[str, Item] = {name: saved(tmp_path / "private" / file) for name, file in named.items()}
    documents |= {f"lost {name}": Image(f"{tmp_path}/private/gone {file}") for name, file in named.items()}
    ids, queries = list(documents), list(sample().task.queries)
    run = {query: [(name, 0.5) for name in ids[place::5]] for place, query in enumerate(queries)}
    base, final = (replace(each, run=run) for each in (sample().baseline, sample().final))
    qrels = {query: dict.fromkeys(ids[place::4], 1) for place, query in enumerate(queries)}
    asked = {query: documents[ids[place]] for place, query in enumerate(queries)}
    task = RetrievalData("hostile", asked, documents, qrels)
    write_report(tmp_path / "report", sample(task=task, baseline=base, final=final, bm25=None))
    html, markdown, data = (
        (tmp_path / "report" / f"report.{form}").read_text("utf-8") for form in ("html", "md", "json")
    )
    for text in (html, markdown, data):
        assert str(tmp_path) not in text
        assert "private" not in text
    shown = assert_sound(html)
    labels = {identifier(attributes) for attributes in shown.named("img")}
    seen = [name for name in named if " ".join(name.split()) in labels]
    boxes = [name for name in named if f"Picture can't be shown: lost {' '.join(name.split())}" in shown.text]
    assert min(len(seen), len(boxes)) > len(HOSTILE) // 2
    assert not {kind for _, kind in shape(markdown)} & {"image", "html_inline"}
    counts = json.loads(data)["pictures"]
    assert 0 < counts["decoded"] < counts["shown"]


def test_what_a_picture_is_relevant_to_stays_inert_in_its_alternative_text(documents: dict[str, Item]) -> None:
    for text in HOSTILE:
        for attributes in page(report_of(documents, {f"q{n}": text for n in range(1, 5)})).named("img"):
            assert attributes.keys() == {"src", "alt", "width", "height"}
            assert (attributes["alt"] or "").endswith(f", relevant to: {' '.join(text.split())}")


def test_a_name_is_the_last_part_of_a_path_of_any_system() -> None:
    names = {"/a/b/c.png": "c.png", "C:\\a\\c.png": "c.png", "c.png": "c.png", "set.parquet:3": "set.parquet:3"}
    names["a/"] = "picture"
    assert {path: picture_name(Image(path)) for path in names} == names
