"""Where the time of a training went, what its numbers suggest and what it took, in all three forms of a report."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from test_report_samples import STEPS, Page, sample

from vembed.evaluation.report.run_report import Finding, build_page
from vembed.evaluation.report.speed import MAX_STRETCHES, NO_FINDINGS, percent_text, seconds_text, split_time
from vembed.pages.html import render_html
from vembed.pages.markdown import render_markdown
from vembed.pages.write import render_json

if TYPE_CHECKING:
    from vembed.pages import page as pages

pytestmark = pytest.mark.usefixtures("drawn_once")

TIMES = {"step_seconds": 1.0, "data_seconds": 0.25, "encode_seconds": 0.5, "loss_seconds": 0.125}


def speed_section(content: pages.Page) -> str:
    found = re.search(r'<section id="speed".*?</section>', render_html(content), re.DOTALL)
    return found.group() if found else ""


def rows(count: int, **changes: float) -> list[dict[str, float]]:
    return [{"step": step, **TIMES, **changes} for step in range(1, count + 1)]


def test_shares_are_of_the_step_and_what_no_part_has_is_everything_else() -> None:
    split = split_time(rows(10))
    assert split is not None
    assert [(part.key, part.share) for part in split.parts] == [
        ("data_seconds", 0.25),
        ("encode_seconds", 0.5),
        ("loss_seconds", 0.125),
        ("", pytest.approx(0.125)),
    ]
    assert sum(part.share for part in split.parts) == pytest.approx(1.0)


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    slow = rows(10)
    slow[0] |= {"step_seconds": 500.0, "encode_seconds": 499.0}
    split = split_time(slow)
    assert split is not None
    assert (split.step_seconds, split.num_steps) == (1.0, 9)
    alone = split_time(slow[:1])
    assert alone is not None
    assert alone.step_seconds == 500.0


def test_the_sentence_names_the_largest_part_and_its_key() -> None:
    encoding, waiting = split_time(rows(5)), split_time(rows(5, data_seconds=0.4, encode_seconds=0.3))
    assert encoding is not None
    assert waiting is not None
    assert "50% of it encoding" in encoding.sentence
    assert "retain" in encoding.sentence
    assert "40% of it waiting for data" in waiting.sentence
    assert "num_workers" in waiting.sentence


def test_long_runs_are_drawn_in_stretches_that_keep_the_mean() -> None:
    many = rows(1_000)
    for row in many[500:]:
        row |= {"step_seconds": 2.0, "encode_seconds": 1.5}
    split = split_time(many)
    assert split is not None
    encode = next(part for part in split.parts if part.key == "encode_seconds")
    assert len(encode.course_N) == len(split.steps_N) == MAX_STRETCHES
    assert (encode.course_N[0], encode.course_N[-1]) == (0.5, 1.5)
    assert encode.seconds == pytest.approx(1.0, abs=0.01)


def test_rows_of_an_older_run_have_no_times_and_no_section() -> None:
    assert split_time(STEPS) is None
    assert split_time([]) is None
    content = build_page(sample(steps=STEPS[:2]))
    assert speed_section(content) == ""
    assert "Speed and health" not in render_markdown(content)
    assert json.loads(render_json(content))["time_of_a_step"] is None
    assert json.loads(render_json(content))["findings"] is None


FINDINGS = (Finding("padding", "1.42 tokens for <each> real | one.", "Lower gradient_cache_chunk_tokens."),)


def test_all_forms_show_the_split_the_findings_and_the_performance() -> None:
    performance = {"model": "<b>tiny</b>", "peak_memory_bytes": 61_000_000_000, "tokens_per_second": 812.5}
    content = build_page(sample(steps=rows(4), findings=FINDINGS, performance=performance))
    page = Page(speed_section(content))
    markdown, document = render_markdown(content), json.loads(render_json(content))
    for text in (page.text, markdown):
        assert "Waiting for data" in text
        assert "250 ms" in text
        assert "Padding." in text
        assert "56.8 GiB" in text
        assert "peak memory" in text
    assert "1.42 tokens for <each> real | one." in page.text
    assert page.named("b") == [], "a model's name is no markup"
    assert "&lt;each> real &#124; one" in markdown
    assert document["findings"] == [
        {"cause": "padding", "sentence": FINDINGS[0].sentence, "advice": FINDINGS[0].advice}
    ]
    assert document["performance"] == performance
    assert document["time_of_a_step"] == {
        "num_steps": 3,
        "step_seconds": 1.0,
        "data_seconds": 0.25,
        "encode_seconds": 0.5,
        "loss_seconds": 0.125,
        "other_seconds": pytest.approx(0.125),
    }
    label = next(svg["aria-label"] for svg in page.named("svg"))
    assert label is not None
    assert "50% of it encoding" in label


def test_a_run_that_was_looked_at_and_is_well_says_so() -> None:
    content = build_page(sample(findings=()))
    assert NO_FINDINGS in Page(speed_section(content)).text
    assert NO_FINDINGS in render_markdown(content)
    assert json.loads(render_json(content))["findings"] == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0000123, "0.0123 ms"), (0.0421, "42.1 ms"), (1.2345, "1.23 s"), (125.4, "125 s")]
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_small_share_is_never_nothing() -> None:
    assert percent_text(0.004) == "under 1%"
    assert percent_text(0.0) == "0%"
    assert percent_text(0.126) == "13%"
