"""Templates, the style of all pages and their words for numbers: no text becomes markup, and everyone can read it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from jinja2 import Environment, UndefinedError
from markupsafe import Markup

import vembed
from vembed.evaluation.card import markdown_environment
from vembed.pages.html import environment, picture_source
from vembed.pages.markdown import escape, fenced
from vembed.pages.page import Cell, Table
from vembed.pages.text import MINUS, bytes_text, clip, number_text, p_text, plain, signed_text, value_text

TEMPLATES = sorted(Path(vembed.__file__).parent.glob("**/templates/*.jinja"))
INVISIBLE = "a\x00b\x1b[31mc\u202ed\ud800e\u2066f\u200bg"
SHOWN = "a\\x00b\\x1b[31mc\\u202ed\\ud800e\\u2066f\\u200bg"
URI = "data:image/webp;base64,"


def test_what_cant_be_seen_is_shown_as_escapes_in_texts_and_markup() -> None:
    joined = environment().from_string("{{ markup ~ text }}").render(markup=Markup("<b>"), text=f"<{INVISIBLE}")
    assert joined == f"<b>&lt;{SHOWN}"
    line = markdown_environment().from_string("{{ text }}").render(text=INVISIBLE)
    assert line == SHOWN.replace("\\", "&#92;").replace("[", "\\[")


def test_markdown_is_escaped_once_whatever_it_passes_through() -> None:
    source = (
        "{% macro line(text) %}{{ text }}!{% endmacro %}{% set kept %}{{ text }}{% endset %}"
        "{{ text }}{{ line(text) }}{{ kept }}{{ table(cells) }}\n{{ pairs_table([(text, text)]) }}\n{{ text | fenced }}"
    )
    text = "<b> | `x`"
    shown = "&lt;b> &#124; &#96;x&#96;"
    cells = Table((text, "n"), [(text, Cell("1", bounds="0 to 2"))])
    assert markdown_environment().from_string(source).render(text=text, cells=cells) == (
        f"{shown}{shown}!{shown}| {shown} | n |\n| --- | ---: |\n| {shown} | 1 (0 to 2) |\n"
        f"| Name | Value |\n| --- | --- |\n| {shown} | {shown} |\n```text\n{text}\n```"
    )


@pytest.mark.parametrize("templates", [environment(), markdown_environment()])
def test_a_slip_of_a_template_is_an_error_and_not_a_word_on_the_page(templates: Environment) -> None:
    for value in (None, True, 0.5, ["x"], Cell("x")):
        with pytest.raises(TypeError, match="make it a text first"):
            templates.from_string("{{ value }}").render(value=value)
    for source in ("{{ missing }}", "{{ value.missing }}", "{% if missing %}{% endif %}"):
        with pytest.raises(UndefinedError):
            templates.from_string(source).render(value={})


def test_only_a_picture_itself_can_be_a_source() -> None:
    for source in ("https://x.example/a.png", "a.png", "data:image/svg+xml;base64,AAAA", f"{URI}AAAA x", ""):
        with pytest.raises(ValueError, match="not an address"):
            picture_source(source)
    assert picture_source(f"{URI}AAAA") == f"{URI}AAAA"


def test_a_text_cant_end_its_block() -> None:
    assert fenced("a ``` ````\n# b") == "`````text\na ``` ````\n# b\n`````"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_switches_escaping_off_or_holds_what_a_page_may_not_have(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"\|\s*(safe|forceescape|xmlattr)\b|autoescape", source)
    if path.name.endswith(".md.jinja"):
        while (inside := re.sub(r"\([^()]*\)", "", source)) != source:  # what a function is given isn't shown yet
            source = inside
        assert " ~ " not in source, "a joined text is escaped for HTML, not for Markdown"
        return
    assert not re.search(r"<(script|iframe|object|embed|base)\b|\son\w+=|\sstyle=|javascript:", source, re.IGNORECASE)
    assert not re.findall(r"=\s*\{\{", re.sub(r"\{%.*?%\}", "", source)), "an attribute without quotes"
    for value in re.findall(r'\ssrc="([^"]*)"', source):
        assert re.fullmatch(r"\{\{ .* \| picture_source \}\}", value)
    for value in re.findall(r'\shref="([^"]*)"', source):
        is_picture_itself = re.fullmatch(r"\{\{ .* \| picture_source \}\}", value)
        assert is_picture_itself or value.startswith(("#", "/?", "data:,")), "a page loads and links nothing elsewhere"


def test_templates_are_found_and_travel_with_the_package() -> None:
    assert {"page.css.jinja", "page.html.jinja", "search.html.jinja", "card.md.jinja"} <= {
        path.name for path in TEMPLATES
    }
    settings = (Path(vembed.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"*/templates/*"' in settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, 0.5 (ok) - fine!", "plain text, 0.5 (ok) - fine!"), ("ndcg@10", "ndcg@10"),
        ("gradient_cache_chunk_size", "gradient_cache_chunk_size"), ("a -> b", "a -> b"), ("_soft_", "\\_soft\\_"),
        ("a|b", "a&#124;b"), ("`x`", "&#96;x&#96;"), ("<b>", "&lt;b>"), ("&lt;", "&amp;lt;"),
        ("[a](b)", "\\[a\\](b)"), ("a\nb\r\n\tc", "a b&#92;x0d c"), ("- item", "&#45; item"), ("---", "&#45;--"),
        ("> quote", "&#62; quote"), ("1. one", "1&#46; one"), ("12) one", "12&#41; one"), ("1.5 GB", "1.5 GB"),
        ("https://x", "https&#58;//x"), ("www.x", "www&#46;x"), ("me@x.org @you", "me@<!-- -->x.org @<!-- -->you"),
        ("$x$", "&#36;x&#36;"), ("\\*", "&#92;\\*"), ("\x1b[0m", "&#92;x1b\\[0m"),
    ],
)  # fmt: skip
def test_only_active_characters_are_escaped(text: str, expected: str) -> None:
    assert escape(text) == expected


def themes() -> tuple[str, list[dict[str, str]]]:
    """Return the style of all pages, and its colours of light and of dark on a screen, later definitions winning."""
    style = environment().get_template("page.css.jinja").render()
    blocks = re.findall(
        r"(@media \(prefers-color-scheme: dark\) \{ )?:root \{([^}]*)\}", style.split("@media print")[0]
    )
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for is_dark, block in blocks:
        (dark if is_dark else light).update(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
    return style, [light, {**light, **dark}]


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_text_colour_of_the_pages_is_legible_in_both_themes() -> None:
    style, (light, dark) = themes()
    assert light["page"] != dark["page"]
    assert light["series-2"] != dark["series-2"]
    texts = {
        "ink": ("page", "card", "soft", "better-soft"),
        "muted": ("page", "card", "soft", "better-soft"),
        "series": ("page", "card", "soft"),
        **{tone: ("page", "card", "soft", f"{tone}-soft") for tone in ("better", "worse", "even")},
        **{f"series-{number}": ("card", "page") for number in (2, 3, 4)},
    }
    used = set(re.findall(r"(?<![-a-z])color: var\(--([a-z0-9-]+)\)", style))
    assert used - {"tone"} <= texts.keys(), "a colour of a text that this test doesn't look at"
    for theme in (light, dark):
        for text, grounds in texts.items():
            for ground in grounds:
                bright, dim = sorted((luminance(theme[text]), luminance(theme[ground])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, ground)
    assert "@media print" in style
    assert "attr(data-label)" in style, "a narrow screen takes tables apart"


def test_numbers_and_other_values_read_well() -> None:
    numbers = {
        0.0: "0", 2e-5: f"2e{MINUS}5", 1.95e-4: f"1.95e{MINUS}4", 0.0125: "0.0125", -3.0: f"{MINUS}3", 1234.4: "1,234",
        1e9: "1e9",
    }  # fmt: skip
    assert {value: number_text(value) for value in numbers} == numbers
    sizes = {0: "0 B", 999: "999 B", 1.5e9: "1.4 GiB", 2.1e7: "20 MiB", math.nan: "n/a"}
    assert {value: bytes_text(value) for value in sizes} == sizes
    signed = {0.1: "+0.100", -0.1: f"{MINUS}0.100", 0.0001: "0.000", -0.0: "0.000", math.inf: "n/a"}
    assert {value: signed_text(value) for value in signed} == signed
    assert [p_text(value) for value in (None, 0.00001, 0.0421, 1.0)] == ["\N{EN DASH}", "< 0.001", "0.042", "1.000"]
    assert value_text("peak_bytes", 2_000_000_000) == "1.86 GiB"
    assert [value_text("x", value) for value in (True, None, math.nan, 2e-4, [1, 2], {"a": [1]})] == [
        *("true", "none", "n/a", "0.0002", "1, 2"),
        '{"a": [1]}',
    ]
    assert plain({1: np.float32(0.5), "a": (np.int64(3), math.inf), "b": {2, 1}}) == {
        "1": 0.5, "a": [3, None], "b": [1, 2]
    }  # fmt: skip


def test_clipping_ends_at_a_word_and_says_so() -> None:
    assert clip("short", 10) == clip("short", 5)
    assert clip("short", 10).full is None
    parts = clip("one two three four five", 15)
    assert (parts.short, parts.full) == ("one two three…", "one two three four five")
    assert clip("x" * 20, 15).short == "x" * 15 + "…"
