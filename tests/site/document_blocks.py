"""The fenced blocks of a document, and the mark that says why one isn't run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
PAGE_NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
RUN = ("bash", "yaml", "python", "jsonl")
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>.*?) -->\n)?^```(?P<language>\w*)(?: (?P<name>\S+))?\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    name: str  # the file that it is meant as, or ""
    text: str
    not_run: str  # why it isn't run, or ""

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, comments dropped."""
        lines = [line.partition(" #")[0].strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks_of(name: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    found = []
    for match in BLOCK.finditer((ROOT / name).read_text("utf-8")):
        mark = match["mark"] or ""
        if mark in ("install", "test"):
            mark = "not run: the continuous integration runs it from an empty environment"
        found.append(Block(name, match["language"], match["name"] or "", match["text"], mark.removeprefix("not run: ")))
    return found
