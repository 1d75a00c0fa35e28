"""Templates: no text of a user becomes markup in any of them, and none may switch that off."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import Environment, UndefinedError
from markupsafe import Markup

import vembed
from vembed.evaluation.card import markdown_environment
from vembed.pages.html import environment, picture_source
from vembed.pages.markdown import fenced
from vembed.pages.page import Cell, Table

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
