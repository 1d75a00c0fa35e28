"""`vembed sweep CONFIG --try key=a,b ...`: train a configuration with several values, and say which are best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.options import ConfigOptions, check, parse_words
from vembed.errors import ExitCode
from vembed.workflows.sweeping.keys import SweepKeys
from vembed.workflows.sweeping.sweep import run_sweep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class SweepOptions(ConfigOptions, SweepKeys):
    """Train a configuration with several values of some keys, and choose the best by the dev set. Each trial is a run
    in DIR/trials. The same command continues a sweep that was stopped.
    """  # noqa: D205 - the sentence that --help prints


OPTIONS = SweepOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Train with several values of some keys, and choose by the dev set."""
    given = parse_words(SweepOptions, arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(given, command))


def _run(given: Mapping[str, Any], command: str) -> int:
    options = check(SweepOptions, given)
    quiet_libraries()
    run_sweep(options, options.path, options.config_override, command)
    return ExitCode.OK
