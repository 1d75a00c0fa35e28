"""docs/reference/commands.md has every command with every option, and nothing that `--help` doesn't show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vembed
from vembed.entrypoints.commands_page import render_commands
from vembed.registry import COMMANDS

PAGE = Path(vembed.__file__).parents[1] / "docs" / "reference" / "commands.md"
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def section(heading: str) -> str:
    """Return the part of the page below a heading, up to the next one."""
    return re.split(r"^#+ ", render_commands().partition(f"# `{heading}`\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_checked_in_page_is_what_the_parsers_say() -> None:
    assert PAGE.read_text("utf-8") == render_commands(), "run `make docs`"


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS.names()), ("data", "check"), ("data", "show")])
def test_the_page_has_the_options_that_the_help_shows(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *others = words
    with pytest.raises(SystemExit):
        COMMANDS.load(name)([*others, "--help"], program=f"vembed {name}")
    shown = set(re.findall(r"^  (?:-\w(?: [^ ,]+)?, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    listed = set(
        OPTION.findall("\n".join(re.findall(r"^\| `([^`]+)`", section(f"vembed {' '.join(words)}"), re.MULTILINE)))
    )
    assert shown <= listed
    assert (len(shown) > 0) == (len(listed) > 0)


def test_descriptions_and_cells_of_the_page_are_whole() -> None:
    text = render_commands()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    for row in rows:
        assert len(re.split(r"(?<!\\)\|", row)) == 4, row
    for name in COMMANDS.names():
        assert section(f"vembed {name}").strip()
