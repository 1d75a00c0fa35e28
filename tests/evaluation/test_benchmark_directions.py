"""`vembed evaluate --both-directions`: two rows for a set of captions and pictures, encoded once, and their sum."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import PIL.Image
import pytest
import torch
from test_report_samples import Page

from vembed.entrypoints.evaluate import main
from vembed.models.from_scratch import TinyClip
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT = 12


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A set of captions that search pictures."""
    folder = tmp_path / "captions"
    folder.mkdir()
    rows = []
    for number in range(COUNT):
        buffer = io.BytesIO()
        PIL.Image.new("RGB", (16, 16), (20 * number, 255 - 20 * number, 90)).save(buffer, "PNG")
        (folder / f"{number}.png").write_bytes(buffer.getvalue())
        rows.append({"query": f"shade number {number}", "positive_image": f"{number}.png"})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.jsonl"
    rows = [{"query": f"word {number}", "positive": f"the word {number}"} for number in range(COUNT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of every encoder call."""
    rows: list[int] = []
    forward = TinyClip.forward

    def counting(self: TinyClip, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = forward(self, inputs)
        rows.append(len(vectors))
        return vectors

    monkeypatch.setattr(TinyClip, "forward", counting)
    return rows


def evaluate(*arguments: object) -> int:
    return main([str(argument) for argument in arguments], program="vembed evaluate")


def board_of(output: Path) -> dict:
    return json.loads((output / "leaderboard.json").read_text())


def test_a_set_of_captions_stands_in_two_rows_and_everything_is_encoded_once(
    captions: Path, tmp_path: Path, encoded: list[int]
) -> None:
    out = tmp_path / "out"
    assert evaluate("builtin:tiny-clip", "--data", captions, "--output", out, "--both-directions") == 0
    assert sum(encoded) == 2 * COUNT
    board = board_of(out)
    assert board["sets"] == ["rows.jsonl", "rows.jsonl reversed"]
    (system,) = board["systems"]
    forward, reverse = (json.loads((out / cell["folder"] / "metrics.json").read_text()) for cell in system["sets"])
    (total,) = board["both_directions"]
    assert total["total"]["value"] == pytest.approx(
        100 * sum(each["metrics"][f"hit@{k}"] for each in (forward, reverse) for k in (1, 5, 10))
    )
    assert total["reverse"] == pytest.approx([100 * reverse["metrics"][f"hit@{k}"] for k in (1, 5, 10)])
    for name in ("leaderboard.html", "leaderboard.md"):
        assert f"{total['total']['value']:.1f}" in (out / name).read_text(), name


@pytest.mark.slow
def test_a_rerun_encodes_nothing_and_the_option_adds_only_the_other_direction(
    captions: Path, tmp_path: Path, encoded: list[int]
) -> None:
    out, plain = tmp_path / "out", ("builtin:tiny-clip", "--data", captions, "--output", tmp_path / "out")
    assert evaluate(*plain) == 0
    assert board_of(out)["both_directions"] == []
    encoded.clear()
    assert evaluate(*plain, "--both-directions") == 0
    assert encoded == [], "the vectors of the set serve its reverse"
    first = board_of(out)
    assert evaluate(*plain, "--both-directions") == 0
    assert encoded == []
    assert board_of(out)["both_directions"] == first["both_directions"]


def test_the_reverse_is_the_set_of_pictures_that_search_their_captions(captions: Path, tmp_path: Path) -> None:
    turned = captions.parent / "turned.jsonl"
    rows = [json.loads(line) for line in captions.read_text().splitlines()]
    turned.write_text(
        "".join(json.dumps({"query_image": row["positive_image"], "positive": row["query"]}) + "\n" for row in rows)
    )
    out = tmp_path / "out"
    assert evaluate("builtin:tiny-clip", "--data", captions, turned, "--output", out, "--both-directions") == 0
    values = {cell["task"]: cell["value"] for cell in board_of(out)["systems"][0]["sets"]}
    assert values["rows.jsonl reversed"] == values["turned.jsonl"]
    assert values["rows.jsonl"] == values["turned.jsonl reversed"]


@pytest.mark.slow
def test_sets_of_texts_are_searched_in_one_direction_and_alone_the_option_is_refused(
    captions: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    NgramBag(NgramBagConfig(dimension=8, buckets=64)).save(tmp_path / "bag")
    out = tmp_path / "out"
    assert evaluate(tmp_path / "bag", "--data", words, "--output", out, "--both-directions") == 2
    assert "no set is one of texts that search pictures" in capsys.readouterr().err
    assert evaluate(tmp_path / "bag", "--data", words, "--output", out) == 0
    capsys.readouterr()
    assert evaluate("builtin:tiny-clip", "--data", words, captions, "--output", out, "--both-directions") == 0
    assert "words.jsonl: searched in one direction, as texts search texts" in capsys.readouterr().out
    assert board_of(out)["sets"] == ["words.jsonl", "rows.jsonl", "rows.jsonl reversed"]


def test_word_matching_stands_on_the_sets_that_it_can_take_and_has_no_mean(
    captions: Path, words: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate("builtin:tiny-clip", "bm25", "--data", captions, words, "--output", out) == 0
    board = board_of(out)
    assert board["sets"] == ["rows.jsonl", "words.jsonl"], "in the order of the command"
    assert [row["system"] for row in board["systems"]] == ["builtin:tiny-clip", "BM25"], "whoever lacks a set is last"
    first, last = board["systems"]
    assert isinstance(first["mean"], float)
    assert (last["mean"], last["interval"], len(last["sets"])) == (None, None, 1)
    shown = Page((out / "leaderboard.html").read_text())
    assert "not on every set" in shown.text
    assert [main["id"] for main in shown.named("main")] == ["main"]
    assert next(link for link in shown.named("a"))["class"] == "skip"
