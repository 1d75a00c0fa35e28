"""The page of `vembed search --serve`: texts found, shown and never run; what it refuses; how it ends."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from browser_cases import needs_browser, running_browser
from search_cases import Page, start_page

if TYPE_CHECKING:
    from pathlib import Path


def test_the_page_answers_a_plain_form(page: Page) -> None:
    status, empty, headers = page.get()
    assert status == 200
    assert '<form method="get" action="/"' in empty
    assert "<li>" not in empty
    assert "4 documents of corpus.jsonl" in empty
    assert "<script" not in empty
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    status, found, _ = page.get("?q=apple+pie+recipe&k=2")
    assert status == 200
    assert re.findall(r'class="id" dir="auto">(\w+)<', found)[0] == "d3"
    assert found.count("<li>") == 2
    assert re.search(r"score 0\.\d{4}", found)
    assert "all there are, of 10 asked for" in page.get("?q=apple")[1]
    assert "all there are" not in found


def test_the_style_is_the_one_that_the_policy_allows(page: Page) -> None:
    import base64
    import hashlib

    _, text, headers = page.get()
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in headers["Content-Security-Policy"]
    assert "style=" not in text


def test_documents_and_queries_are_shown_and_never_run(page: Page) -> None:
    hostile = '"><script>alert(2)</script>\x1b'
    _, text, _ = page.get(f"?q={quote(hostile)}")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; \\x1b[31m \\u202e" in text
    assert 'value="&#34;&gt;&lt;script&gt;alert(2)&lt;/script&gt;' in text


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("?q=a&k=0", 400, "k is a whole number from 1 to 100"),
        ("?q=a&k=x", 400, "k is a whole number"),
        (f"?q={'a' * 2001}", 400, "has 2,001 characters; at most 2,000"),
        (f"?q={'a' * 70_000}", 414, ""),
        ("?" + "&".join(f"a{number}=1" for number in range(40)), 400, "Too many fields"),
        ("etc/passwd", 404, "one page here"),
        ("../../etc/passwd", 404, "one page here"),
    ],
)
def test_the_page_refuses_with_a_sentence_and_goes_on(page: Page, path: str, status: int, message: str) -> None:
    answered, text, headers = page.get(path)
    assert answered == status
    assert message in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert page.get(f"?q={'a' * 2000}&k=100")[0] == 200


def test_other_methods_and_other_hosts_are_refused(page: Page) -> None:
    assert page.get("", Host="evil.example")[0] == 403
    assert page.get("", Host="localhost:9999")[0] == 200
    for method, code in (("PUT", 501), ("POST", 400)):
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(page.url, data=b"q=a", method=method), timeout=30)
        assert caught.value.code == code
    with urlopen(Request(page.url, method="HEAD"), timeout=30) as answer:
        assert answer.read() == b""


def test_many_ask_at_once(page: Page) -> None:
    from concurrent.futures import ThreadPoolExecutor

    queries = {"apple+pie+recipe": "d3", "train+at+noon": "d2", "red+trees": "d1"}
    asked = list(queries) * 5
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda query: page.get(f"?q={query}&k=1")[1], asked)
        assert [re.findall(r'class="id" dir="auto">(\w+)<', text) for text in answers] == [[queries[q]] for q in asked]


def test_a_port_that_is_taken_is_said(call: Any, page: Page, index: Path) -> None:
    refused = call("search", index, "--serve", "--port", page.port)
    assert refused.code == 5
    assert f"port {page.port} can't be used" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_page_cleanly_even_with_an_open_connection(index: Path, number: signal.Signals) -> None:
    import socket

    started = start_page(index)
    with socket.create_connection(("127.0.0.1", started.port)) as idle:
        idle.sendall(b"GET / HT")
        assert started.get()[0] == 200
        started.process.send_signal(number)
        assert started.process.wait(timeout=30) == 0
    assert started.output.read_text().rstrip().endswith("\nended")


@needs_browser
@pytest.mark.slow
def test_a_real_browser_shows_the_right_document_first(page: Page, tmp_path: Path) -> None:
    with running_browser(tmp_path) as browser:
        browser.open(f"{page.url}?q=apple+pie+recipe")
        hits = browser.value("[...document.querySelectorAll('li')].map(hit => hit.innerText)")
        assert len(hits) == 4
        assert "d3" in hits[0]
        assert "a recipe for apple pie" in hits[0]
        assert browser.value("document.scripts.length") == 0
        assert not browser.said, "the page asks for nothing that its own policy forbids"
