"""The page of `vembed search --serve` on pictures: thumbnails, uploads, hostile names and hostile files."""

from __future__ import annotations

import html
import json
import re
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from browser_cases import Browser, needs_browser, running_browser
from kit.balls import COLOURS, ball, bomb, caption
from search_cases import Page, served_here

import vembed
from vembed.workflows.search.serve import MAX_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGE = re.compile(r'<img src="data:image/webp;base64,([A-Za-z0-9+/=]+)" alt="([^"]*)" width="(\d+)" height="(\d+)">')


def cards(text: str) -> list[str]:
    return re.findall(r'<li class="picture">(.*?)</li>', text, flags=re.DOTALL)


def ids(text: str) -> list[str]:
    return [html.unescape(name) for name in re.findall(r'class="id" dir="auto">([^<]*)<', text)]


def test_a_text_finds_cards_with_thumbnails(picture_page: Page) -> None:
    status, text, headers = picture_page.get("?q=a+green+ball&k=3")
    assert status == 200
    assert ids(text)[0] == "green.png"
    assert len(cards(text)) == 3
    (copy, alt, width, height) = IMAGE.search(cards(text)[0]).groups()  # type: ignore[union-attr]
    assert (alt, width, height) == ("Picture green.png", "96", "64")
    assert len(copy) > 50
    assert re.search(r"score \d\.\d{4}", cards(text)[0])
    assert "3 nearest pictures in" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; img-src data:;")
    assert "<script" not in text
    assert "http" not in text.replace(picture_page.url, "")


def test_the_first_page_offers_examples_and_a_field_for_a_picture(picture_page: Page) -> None:
    _, text, _ = picture_page.get()
    assert "4 pictures of balls" in text
    assert 'type="file"' in text
    assert 'method="post"' in text
    links = re.findall(r'href="(/\?like=\d+&amp;k=10)"', text)
    assert len(links) == 3
    _, like, _ = picture_page.get(html.unescape(links[1]).lstrip("/"))
    assert "Nearest to <strong" in like
    assert ids(like)[0] == "green.png"


@pytest.mark.parametrize("colour", sorted(COLOURS))
def test_a_picture_that_is_sent_finds_its_like(picture_page: Page, colour: str) -> None:
    status, text = picture_page.post(ball(colour, "JPEG"), name="my <b>photo</b>.jpg", k=2)
    assert status == 200
    assert len(cards(text)) == 2
    assert ids(text)[0] == f"{colour}.png"
    assert 'Nearest to <strong dir="auto">b&gt;.jpg</strong>' in text, "without what looks like a folder"
    assert "<b>" not in text
    assert len(IMAGE.findall(text)) == 3, "what was sent is shown beside the hits"


def test_a_picture_and_a_text_are_one_query(picture_page: Page) -> None:
    status, text = picture_page.post(ball("red"), q=caption("blue"), k=2)
    assert status == 200
    assert set(ids(text)) == {"red.png", "blue.png"}
    assert "and “a blue ball”" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.png: the file is empty"),
        (b"just a text", "x.png: no picture of a known format"),
        (b"<svg onload=alert(1)>", "x.png: no picture of a known format"),
        (bomb(), "x.png: 100,000 x 100,000 = 10,000,000,000 pixels are over the limit"),
        (ball("red", "JPEG")[:-300], "x.png: the JPEG can&#39;t be decoded"),
        (ball("red")[:40], "x.png: "),
    ],
)
def test_a_hostile_upload_is_refused_with_the_reason_and_the_server_lives_on(
    picture_page: Page, content: bytes, message: str
) -> None:
    status, text = picture_page.post(content)
    assert status == 400
    assert message in text
    assert 'role="alert"' in text
    status, text = picture_page.post(ball("red"))
    assert (status, ids(text)[0]) == (200, "red.png")


def test_forms_that_are_none_are_refused_with_a_sentence(picture_page: Page) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="picture"; filename="a"\r\n\r\n'
    for body, headers, status, message in (
        (b"q=a", {"Content-Type": "application/x-www-form-urlencoded"}, 400, "sent as multipart/form-data"),
        (b"", form, 400, "The form is broken"),
        (part + b"cut", form, 400, "The form is broken"),
        (b"--x\r\n\r\n\r\n--x--", form, 400, "The form is broken"),
        (
            b'--x\r\nContent-Disposition: form-data; name="k"\r\n\r\n7\r\n' * (MAX_PARTS + 1) + b"--x--",
            form,
            400,
            "8 parts",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="picture"; filename=""\r\n\r\n\r\n--x--',
            form,
            400,
            "No picture",
        ),
        (part + ball("red") + b"\r\n--x--", {**form, "Sec-Fetch-Site": "cross-site"}, 403, "Another site"),
        (part + ball("red") + b"\r\n--x--", {**form, "Host": "evil.example"}, 403, "This page is at"),
        (part + ball("red") + b"\r\n--x--", {**form, "Sec-Fetch-Site": "same-origin"}, 200, "Nearest to"),
    ):
        answered, text = picture_page.send(body, headers)
        assert answered == status, text
        assert message in text


@pytest.mark.parametrize("length", ["", "Content-Length: x\r\n", "Transfer-Encoding: chunked\r\n"])
def test_a_form_of_unknown_length_is_refused(picture_page: Page, length: str) -> None:
    with socket.create_connection(("127.0.0.1", picture_page.port), timeout=30) as connection:
        head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        connection.sendall(f"{head}{length}\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.0 411 ")
    assert b"A form says how long it is." in answer


def trickling(page: Page) -> socket.socket:
    """Begin to send a form, and send no more than its beginning."""
    connection = socket.create_connection(("127.0.0.1", page.port), timeout=60)
    head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=limit\r\n"
    connection.sendall(f"{head}Content-Length: 100000\r\n\r\n--limit\r\n".encode())
    return connection


def test_slow_senders_do_not_keep_others_from_searching_with_a_picture(picture_page: Page) -> None:
    with ExitStack() as stack:
        senders = [stack.enter_context(trickling(picture_page)) for _ in range(6)]
        time.sleep(0.2)  # so that all of them are being read
        for sender in senders:
            sender.sendall(b"C")
        started = time.monotonic()
        assert ids(picture_page.post(ball("green"))[1])[0] == "green.png"
        assert time.monotonic() - started < 25, "an idle connection is closed after 30 s: that is what it waited for"


def test_a_form_that_never_ends_is_closed_in_time(picture_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.workflows.search.serve.FORM_SECONDS", 0.2)
    with served_here(picture_index) as page, trickling(page) as sender:
        time.sleep(0.3)
        sender.sendall(b"Content")
        answer = b"".join(iter(lambda: sender.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.0 408 ")
        assert b"seconds to arrive" in answer


def test_more_senders_than_the_server_takes_are_refused_at_once(
    picture_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.serve.UPLOADS_AT_ONCE", 1)
    with served_here(picture_index) as page:
        with trickling(page):
            time.sleep(0.2)
            status, text = page.post(ball("green"))
            assert status == 503
            assert "Too many pictures are being sent" in text
        deadline = time.monotonic() + 20
        while page.post(ball("green"))[0] != 200:
            assert time.monotonic() < deadline, "the place of a sender that has gone isn't free again"


def test_a_picture_over_the_limit_of_bytes_is_refused_once_it_was_sent(picture_page: Page) -> None:
    with socket.create_connection(("127.0.0.1", picture_page.port), timeout=30) as connection:
        head = "POST / HTTP/1.0\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        connection.sendall(f"{head}Content-Length: {65 * 2**20}\r\n\r\n".encode())
        block = bytes(2**20)
        for _ in range(65):
            connection.sendall(block)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.0 413 ")
    assert b"over the limit of 67,108,864 bytes" in answer
    assert picture_page.post(ball("red"))[0] == 200


def test_a_picture_is_refused_where_nothing_can_read_it(index: Path) -> None:
    with served_here(index) as page:
        status, text = page.post(ball("red"))
        assert status == 400
        assert "takes texts, but no pictures" in text
        assert 'type="file"' not in page.get()[1], "nor is the field shown"
        assert ids(page.get("?like=2")[1])[0] == "d3", "what is like a text can be asked all the same"


@pytest.mark.parametrize("path", ["?like=4", "?like=-1", "?like=x", "?like=0&k=0"])
def test_documents_that_are_not_there_are_refused(picture_page: Page, path: str) -> None:
    assert picture_page.get(path)[0] == 400
    assert picture_page.get("?like=3")[0] == 200


@pytest.fixture(scope="module")
def hostile_page(clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A corpus whose ids, paths and captions try everything."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = []
    for number, colour in enumerate(COLOURS):
        path = f"\"><img src=x onerror=alert({number})> \u202e'{colour}.png"
        (folder / path).write_bytes(ball(colour))
        said = f'{caption(colour)} " onload="alert(1) &lt;/a&gt;</a><style>*{{display:none}}</style>'
        rows.append({"_id": f"<script>alert({number})</script>\x1b", "image": path, "caption": said})
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vembed.build_index(clip, folder / "c.jsonl", folder / "index")
    with served_here(folder / "index") as started:
        yield started


def test_hostile_ids_paths_and_captions_are_shown_and_never_run(hostile_page: Page) -> None:
    for text in (hostile_page.get("?q=a+red+ball")[1], hostile_page.get("?like=0")[1], hostile_page.get()[1]):
        assert "<script" not in text
        assert text.count("<style>") == 1
        assert text.count("onerror") == text.count("img src=x onerror")
        assert "<img src=x" not in text
        assert '" onload' not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    card = cards(hostile_page.get("?q=a+red+ball")[1])[0]
    assert "&lt;script&gt;alert(0)&lt;/script&gt;\\x1b" in card
    assert "&#34;&gt;&lt;img src=x onerror=alert(0)&gt;" in card
    assert "a red ball" in (IMAGE.search(card) or [""] * 3)[2], "the caption is the alt text"


def test_a_form_is_taken_apart_whatever_its_file_holds(picture_page: Page) -> None:
    content = ball("red") + b"\r\n-x-\r\n\x00\xff--x--\r\n--\r\n"  # what stands behind a picture's end is no matter
    body = (
        b'--x\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n--x\r\ncontent-disposition: form-data; '
        b'name="picture"; filename="/dir/a %22b%22.png"\r\nContent-Type: image/png\r\n\r\n' + content + b"\r\n--x--\r\n"
    )
    form = {"Content-Type": 'multipart/form-data; boundary="x"'}
    status, text = picture_page.send(body, form)
    assert status == 200
    assert 'Nearest to <strong dir="auto">a &#34;b&#34;.png</strong>' in text
    assert ids(text)[0] == "red.png"
    assert len(ids(text)) == 3
    for end in (*range(0, len(body) - 4, 31), len(body) - 5):
        status, text = picture_page.send(body[:end], form)
        assert (status, "The form is broken" in text) == (400, True), end


# --- in a browser

FIRST_CARD = """(() => {
  const image = document.querySelector("li.picture img");
  const id = document.querySelector("li.picture .id").textContent;
  return JSON.stringify({id, alt: image.alt, width: image.naturalWidth, height: image.naturalHeight});
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@needs_browser
def test_typing_a_query_shows_the_right_picture_first_with_its_pixels(picture_page: Page, browser: Browser) -> None:
    browser.open(picture_page.url)
    browser.wait_for("document.activeElement.id === 'q'")  # given with the first frame, which may follow the load
    browser.type(caption("yellow"))
    browser.press("Enter", 13)
    browser.wait_for("document.querySelector('li.picture')")
    assert json.loads(browser.value(FIRST_CARD)) == {
        "id": "yellow.png", "alt": "Picture yellow.png", "width": 96, "height": 64,
    }  # fmt: skip
    assert browser.value("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert browser.value("document.scripts.length") == 0
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert not browser.said, "the page asks for nothing that its own policy forbids"


@needs_browser
def test_a_picture_that_is_dropped_onto_the_page_is_searched_with_the_keyboard(
    picture_page: Page, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jpg"
    path.write_bytes(ball("blue", "JPEG"))
    browser.open(picture_page.url)
    browser.drop(path, "#p")
    browser.wait_for("document.querySelector('#p').files.length === 1")
    browser.value("document.querySelector('.by-picture button').focus()")
    browser.press("Enter", 13)
    browser.wait_for("document.querySelector('li.picture')")
    assert json.loads(browser.value(FIRST_CARD))["id"] == "blue.png"
    assert browser.value("document.querySelector('.asked img').naturalWidth") == 96
    assert "mine.jpg" in browser.value("document.querySelector('.asked').textContent")
    browser.value("document.querySelectorAll('li.picture a')[1].focus()")
    second = browser.value("document.querySelectorAll('li.picture .id')[1].textContent")
    browser.press("Enter", 13)
    browser.wait_for("location.search.startsWith('?like=')")
    assert json.loads(browser.value(FIRST_CARD))["id"] == second, "a picture leads to what is like it"
    assert not browser.said


@needs_browser
def test_hostile_names_run_nothing_in_a_browser(hostile_page: Page, browser: Browser) -> None:
    for address in ("", "?q=a+red+ball", "?like=1"):
        browser.open(hostile_page.url + address)
        browser.wait_for("document.images.length")
        assert browser.value("document.scripts.length") == 0
        assert browser.value("[...document.images].every(image => image.src.startsWith('data:image/webp'))")
        assert browser.value("getComputedStyle(document.body).display") == "block"
    assert not browser.said


@needs_browser
def test_the_page_fits_a_phone(picture_page: Page, browser: Browser, tmp_path: Path) -> None:
    browser.ask("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    for address in ("", "?q=a+red+ball"):
        browser.open(picture_page.url + address)
        assert browser.value("document.documentElement.scrollWidth") == 360
    columns = browser.value("getComputedStyle(document.querySelector('ol.grid')).gridTemplateColumns.split(' ').length")
    assert columns == 2
    browser.ask("Emulation.clearDeviceMetricsOverride")
