"""The Markdown report: the same facts, and nothing that a user wrote acts as Markdown or HTML."""

from __future__ import annotations

import re

import pytest
from test_report_html import HOSTILE, hostile_report
from test_report_samples import sample

from vembed.evaluation.report.run_report import build_page
from vembed.pages.markdown import escape, render_markdown

MARKUP = (
    *HOSTILE,
    "[link](https://evil.example) ![image](x.png) <https://evil.example>",
    "a | b | c",
    "``` ```` `code` ~~~",
    "# heading\n\n- item\n\n1. one\n\n> quote\n\n---\n\n    code",
    "**bold** _soft_ ~~gone~~ \\*escaped\\*",
    "https://evil.example www.evil.example me@evil.example @everyone #12",
    "\\| \\\\| \\`",
    "<details><summary>x</summary>",
    "[ref]: https://evil.example",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, 0.5 (ok) - fine!", "plain text, 0.5 (ok) - fine!"),
        ("ndcg@10", "ndcg@10"),
        ("gradient_cache_chunk_size", "gradient_cache_chunk_size"),
        ("a -> b", "a -> b"),
        ("_soft_", "\\_soft\\_"),
        ("a|b", "a&#124;b"),
        ("`x`", "&#96;x&#96;"),
        ("<b>", "&lt;b>"),
        ("&lt;", "&amp;lt;"),
        ("[a](b)", "\\[a\\](b)"),
        ("a\nb\r\n\tc", "a b&#92;x0d c"),
        ("- item", "&#45; item"),
        ("---", "&#45;--"),
        ("> quote", "&#62; quote"),
        ("1. one", "1&#46; one"),
        ("12) one", "12&#41; one"),
        ("1.5 GB", "1.5 GB"),
        ("https://x", "https&#58;//x"),
        ("www.x", "www&#46;x"),
        ("me@x.org @you", "me@<!-- -->x.org @<!-- -->you"),
        ("$x$", "&#36;x&#36;"),
        ("\\*", "&#92;\\*"),
        ("\x1b[0m", "&#92;x1b\\[0m"),
    ],
)
def test_only_active_characters_are_escaped(text: str, expected: str) -> None:
    assert escape(text) == expected


@pytest.mark.parametrize("text", MARKUP)
def test_text_of_users_is_inert(text: str) -> None:
    parser = pytest.importorskip("markdown_it", reason="markdown-it-py isn't installed").MarkdownIt("commonmark")
    parser.enable(["table", "strikethrough"])
    harmless = parser.parse(render_markdown(build_page(hostile_report("harmless")), html_name="report.html"))
    hostile = parser.parse(render_markdown(build_page(hostile_report(text)), html_name="report.html"))

    def shape(tokens: list) -> list[tuple[str, str]]:
        children = [child for token in tokens for child in token.children or [] if child.content != "<!-- -->"]
        inline = [("inline", child.type) for child in children if child.type != "text"]
        return [(token.type, token.tag) for token in tokens] + inline

    assert shape(hostile) == shape(harmless)
    links = [child for token in hostile for child in token.children or [] if child.type == "link_open"]
    assert [link.attrs["href"] for link in links] == ["report.html"]


def test_a_command_cant_leave_its_block() -> None:
    command = "run `a` ```\n````\n# not a heading\n<b>"
    text = render_markdown(build_page(sample(command=command)))
    block = re.search(r"^(`{3,})text\n(.*?)\n\1$", text, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    assert block.group(2) == command
    assert len(block.group(1)) == 5


def test_the_facts_of_the_page_are_here_too() -> None:
    text = render_markdown(build_page(sample()))
    for fact in (
        "# toy run",
        "≈ WITHIN NOISE",
        "| ndcg@10 | 0.438 (",
        "| +0.200 (\N{MINUS SIGN}0.709 to +1.109) | ≈ within noise |",
        "| Records | 8,219 |",
        "1. The batch does not fit as one chunk.",
        "| Python | 3.11.7 |",
        "| batch_size | 256 |",
        "python run.py toy.yaml --config_override batch_size=256",
        "1. ✓ right: The cat sat.",
        "- ○ missed: Fish swim.",
        "| 20 | 0.610 |",
    ):
        assert fact in text, fact
    assert "| BM25 |" in text
    assert "BM25" not in render_markdown(build_page(sample(bm25=None)))


def test_an_empty_run_has_a_document() -> None:
    empty = sample(steps=[], evaluations=[], bm25=None, plan={}, config={}, environment={}, data_facts=[])
    text = render_markdown(build_page(empty))
    assert "No plan was given." in text
    assert "No data facts were given." in text
    assert "Not logged: Training loss" in text
