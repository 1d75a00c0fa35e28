"""Pages run no script: a block to copy is selected by one click of the mouse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from browser_cases import needs_browser, running_browser

from vembed.pages.html import render_html
from vembed.pages.page import Code, Note, Page

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_one_click_selects_a_block_to_copy_and_nothing_else(tmp_path: Path, width: int) -> None:
    text = f"vembed train {'config.yaml ' * 20}\n--resume never"
    page = tmp_path / "page.html"
    blocks = [Note("before"), Code(text, "Command"), Note("after")]
    page.write_text(render_html(Page("kind", "title", blocks, [], {})))
    with running_browser(tmp_path / "profile") as browser:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.ask("Emulation.setDeviceMetricsOverride", **metrics)
        browser.open(page.as_uri())
        box = json.loads(browser.value("JSON.stringify(document.querySelector('pre code').getBoundingClientRect())"))
        for kind in ("mousePressed", "mouseReleased"):
            browser.ask(
                "Input.dispatchMouseEvent", type=kind, x=box["x"] + 30, y=box["y"] + 8, button="left", clickCount=1
            )
        assert browser.value("getSelection().toString()") == text
        if width == 390:
            assert browser.value(
                "document.querySelector('pre').scrollWidth <= document.querySelector('pre').clientWidth"
            )
