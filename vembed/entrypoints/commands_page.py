"""Write docs/reference/commands.md: every command with its options, from the parsers that read them.

`python -m vembed.entrypoints.commands_page > docs/reference/commands.md`
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING
from unittest.mock import patch

from vembed.registry import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """# Commands

<!-- Written by `make docs`; change the options of the commands, not this file. -->

`vembed COMMAND --help` prints the same. Defaults that the table leaves open are those of the
[configuration](../configuration.md). `python run.py` is `vembed train`.
"""


def render_commands() -> str:
    """Return the text of docs/reference/commands.md."""
    return "\n".join([_HEAD, *(line for name in COMMANDS.names() for line in _section(_parser(name, ()), level=2))])


def _parser(name: str, words: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return the parser that answers `vembed NAME WORDS --help`."""
    found: list[argparse.ArgumentParser] = []
    # A command makes its parser itself and hands it to nobody; argparse shows the one that was asked for help.
    shown = patch.object(argparse.ArgumentParser, "print_help", lambda parser, *_: found.append(parser))
    with shown, suppress(SystemExit):
        COMMANDS.load(name)([*words, "--help"], program=f"vembed {name}")
    return found[0]


def _section(parser: argparse.ArgumentParser, *, level: int) -> Iterator[str]:
    """Yield the lines of one command: its description, a table for each heading of its options, its actions."""
    yield from (f"{'#' * level} `{parser.prog}`", "", parser.description or "", "")
    tables: dict[str, list[str]] = {"": []}  # heading of the help -> rows; words and plain options have none
    actions: list[argparse.ArgumentParser] = []
    for group in parser._action_groups:
        heading = "" if group.title in ("positional arguments", "options") else group.title or ""
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += action.choices.values()
            elif not isinstance(action, argparse._HelpAction):
                meaning = (action.help or "").replace("%%", "%").replace("|", "\\|")
                tables.setdefault(heading, []).append(f"| `{_spelling(action)}` | {meaning} |")
    for heading, rows in tables.items():
        if rows:
            yield from ((f"{heading[0].upper()}{heading[1:]}:", "") if heading else ())
            yield from ("| Option | Meaning |", "|---|---|", *rows, "")
    if parser.epilog:
        yield from (parser.epilog, "")
    for each in actions:
        yield from _section(each, level=level + 1)


def _spelling(action: argparse.Action) -> str:
    """Return an option or a positional word as it is typed."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest)
    value = (value if isinstance(value, str) else " ".join(value)).replace("|", " or ")  # a bar would end the cell
    if action.nargs == 0:
        return ", ".join(action.option_strings)
    several = {"+": f"{value} ...", "?": f"[{value}]"}.get(str(action.nargs), value)
    return f"{', '.join(action.option_strings)} {several}".strip()


if __name__ == "__main__":
    sys.stdout.write(render_commands())
