"""`vembed compare RUN RUN ... --output DIR`: how runs differ, and which is better."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.distributed.lock import hold_output
from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.errors import ExitCode
from vembed.files import home_path
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = (
    "Compare runs: settings that differ, metrics with paired tests on the same queries, curves, time and memory, and "
    "the queries that each run wins and loses against the first."
)


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of a comparison."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, or a pattern in quotes")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument("--baseline", metavar="RUN", help="what the others are compared with; default: the first run")
    parser.add_argument(
        "--metric", metavar="M", help="what to compare by; default: metric_for_best_model of the baseline"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Compare runs: settings, metrics with paired tests, curves, time and memory."""
    parsed = parse_arguments(arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(parsed, command))


def _run(parsed: argparse.Namespace, command: str) -> int:
    from vembed.comparison.compare import compare_runs
    from vembed.comparison.page import terminal_lines

    quiet_libraries()
    output = home_path(parsed.output)
    with hold_output(output):
        comparison = compare_runs(parsed.runs, output, parsed.baseline, metric=parsed.metric, command=command)
    print("\n".join([*terminal_lines(comparison), *comparison.notes]))
    print(f"report: {redact(str(output / 'compare.html'))}")
    return ExitCode.OK
