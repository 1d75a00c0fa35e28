"""What the program did before stays what it does: messages, reference, runs, pages, to the word.

An intended change is frozen with `python tests/golden/make.py PART`; README.md here says how.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import make
import pytest
from golden_mistakes import mistakes
from golden_runs import environment
from golden_text import differences, page_lines, text_lines

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ("messages", "reference")
PAGE = """<main id="m"><h1>Title</h1><table class="b a">{rows}</table><svg><g><text>drawn</text></g></svg>
<section id="speed"><p>A step took 1.97 s on average</p><td>87%</td></section></main>"""


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part in QUICK else pytest.mark.slow) for part in make.PARTS]
)
def test_it_does_what_it_did(part: str, tmp_path: Path) -> None:
    why_not = make.comparable(part)
    if why_not is not None:
        pytest.skip(why_not)
    changes = make.compare(part, make.produce(part, folder=tmp_path.resolve()))
    assert not changes, "\n".join([f"python tests/golden/make.py {part} would freeze this change:", *changes])


def test_mistakes_of_newcomers_are_answered_by_name_and_in_time() -> None:
    _, answers = make.frozen("mistakes")
    faults = {mistake.case.name: mistake.faults(answers[mistake.case.name]) for mistake in mistakes()}
    assert len(faults) == 37
    assert {name: found for name, found in faults.items() if found} == {}
    silent = {"code": 0, "out": ["step 1/8  loss 2.1", "improved: ndcg@10 0.1 -> 1.0"]}
    assert all(mistake.faults(silent) for mistake in mistakes())  # an answer without the cure has a fault


@pytest.mark.slow
def test_a_run_that_diverges_is_diagnosed_whatever_its_course(tmp_path: Path) -> None:
    """Its course hangs on the last digits of a processor, so that its words can't be frozen."""
    mistake = next(each for each in mistakes() if each.case.name == "a learning rate far too high")
    config = {**json.loads(mistake.case.files["a.json"]), "learning_rate": 50.0}
    for name, content in {**mistake.case.files, "a.json": json.dumps(config)}.items():
        assert isinstance(content, str)
        (tmp_path / name).write_text(content, "utf-8")
    done = subprocess.run(
        [sys.executable, make.TREE / "run.py", "a.json"],
        cwd=tmp_path, env=environment(make.TREE), capture_output=True, text=True, check=False,
    )  # fmt: skip
    answer = {"code": done.returncode, "out": done.stdout.splitlines(), "err": done.stderr.splitlines()}
    assert mistake.faults(answer) == []
    assert "diagnosis     learning rate too high: " in done.stdout


def test_a_changed_message_number_or_hash_is_found() -> None:
    _, messages = make.frozen("messages")
    name = "rule batch_size=1"
    changed = {**messages, name: {**messages[name], "err": [line.upper() for line in messages[name]["err"]]}}
    (text,) = differences(messages, changed, exact=False)
    assert text.startswith(f"{name}.err:\n")
    assert "IN-BATCH NEGATIVES" in text
    one, other = {"loss": 1.0, "sha256": "a"}, {"loss": 1.0001, "sha256": "b"}
    assert len(differences(one, other, exact=True)) == 2
    assert differences(one, other, exact=False) == []
    assert len(differences(one, {"loss": 1.01}, exact=False)) == 1
    assert differences({"a": 1, "b": [1]}, {"b": [1, 2], "c": 1}, exact=True) == [
        "a: gone, was 1", "b: 1 entries became 2", "c: new, 1"
    ]  # fmt: skip
    assert differences({"fits": True}, {"fits": 1}, exact=True)


def test_a_page_is_told_by_its_nodes_and_not_by_its_spaces_times_and_drawings() -> None:
    rows = [f"<tr><td>row {number}</td></tr>" for number in range(6)]
    lines = page_lines(PAGE.format(rows="".join(rows)), {})
    assert lines[:3] == ["<main> id=[m]", " <h1> | Title", " <table> class=[a b]"]
    assert lines[3:5] == ["  <tr>", "   <td> | row 0"]
    assert lines[7].startswith("  ... 4 more <tr>, 8 lines form=")
    assert lines[8:] == [" <svg>", " <section> id=[speed]", "  <p> | A step took #", "  <td> | #"]
    again = PAGE.format(rows="\n ".join(rows)).replace("drawn", "other").replace("1.97", "2.5").replace("87%", "3%")
    assert page_lines(again, {}) == lines
    for old, new in (("Title", "title"), ('id="m"', 'id="n"'), ("b a", "b"), ("row 5", "row 6"), ("h1", "h2")):
        assert page_lines(PAGE.format(rows="".join(rows)).replace(old, new), {}) != lines, old


def test_a_text_keeps_what_no_machine_and_no_clock_decides() -> None:
    text = (
        "/tmp/x/a took 1.5 s at 2026-11-22 11:37:09,196; 12 rows\nstep 1/4  loss 4.0975    16/s  1:20 left\n"
        "step 2: encoding chunk 3 of 40, about 1:20 left in this step\ntime  0:03 for 4 steps: 0:01 steps"
    )
    assert text_lines(text, {"/tmp/x": "WORK"}) == [
        "WORK/a took # s at TIME; 12 rows",
        "step 1/4  loss 4.0975  #/s",
        "time  # for 4 steps",
    ]
