"""`vembed COMMAND`: the same commands as `python -m vembed COMMAND`."""

from __future__ import annotations

import sys

import vembed
from vembed.errors import ConfigError, ExitCode
from vembed.registry import COMMANDS, import_installed, installed_names

_USAGE = """usage: vembed [--plugins MODULE,...] COMMAND ...

{listing}

vembed help COMMAND shows the options of a command, vembed --version the version. --plugins imports Python modules
first, such as one that defines a model."""


def main() -> int:
    """Run the command that the first word names and return its exit code."""
    try:
        return _run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command itself looks after signals
        print("interrupted", file=sys.stderr)  # noqa: T201
        return ExitCode.INTERRUPTED


def _run(words: list[str]) -> int:
    if words and words[0].startswith("--plugins="):
        words[:1] = words[0].split("=", 1)
    try:
        if words[:1] == ["--plugins"]:
            from vembed.registry import import_plugins

            import_plugins(words[1].split(",") if words[1:] else [])
            words = words[2:]
        if words[:1] in (["--version"], ["-V"], ["version"]):
            print(f"vembed {vembed.__version__}")  # noqa: T201
            return ExitCode.OK
        if words[:1] == ["help"]:
            words = [*words[1:2], "--help"]
        if not words or words[0] in ("-h", "--help"):
            print(_USAGE.format(listing=_listing()))  # noqa: T201
            return ExitCode.OK if words else ExitCode.CONFIG
        command = COMMANDS.load(words[0])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    program = f"vembed {words[0]}"
    if words[0] in COMMANDS.plugins():  # ours tell their errors themselves
        from vembed.entrypoints.command import run_command

        return run_command(lambda: command(words[1:], program=program))
    result: int = command(words[1:], program=program)
    return result


def _listing() -> str:
    """Return a line for each command: its name and what it does."""
    for name in installed_names():  # a package doesn't say which of its names are commands, so all are looked at
        try:
            import_installed(name)
        except ConfigError as error:
            print(f"warning: {error}", file=sys.stderr)  # noqa: T201
    lines = []
    width = max(10, *map(len, COMMANDS.names()))
    for name in COMMANDS.names():
        meaning = (COMMANDS.load(name).__doc__ or "").strip().partition("\n")[0].removesuffix(".")
        lines.append(f"  {name:<{width}} {meaning[:1].lower()}{meaning[1:]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
