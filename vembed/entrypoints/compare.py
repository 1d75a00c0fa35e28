"""`vembed compare RUN RUN ... --output DIR`: how runs differ, and which is better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vembed.distributed.lock import hold_output
from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.options import Options, check, parse_words
from vembed.errors import ExitCode
from vembed.files import home_path
from vembed.redact import redact
from vembed.section import option, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class CompareOptions(Options):
    """Compare runs: settings that differ, metrics with paired tests on the same queries, curves, time and memory, and
    the queries that each run wins and loses against the first.
    """  # noqa: D205 - the sentence that --help prints

    runs: list[str] = word("RUN", "output folder of a run, or a pattern in quotes")
    output: Path = option(..., "folder of the report", metavar="DIR")
    baseline: str | None = option(None, "what the others are compared with; default: the first run", metavar="RUN")
    metric: str | None = option(None, "what to compare by; default: metric_for_best_model of the baseline", metavar="M")


OPTIONS = CompareOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Compare runs: settings, metrics with paired tests, curves, time and memory."""
    given = parse_words(CompareOptions, arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(given, command))


def _run(given: Mapping[str, Any], command: str) -> int:
    options = check(CompareOptions, given)
    from vembed.workflows.comparison.compare import compare_runs
    from vembed.workflows.comparison.page import terminal_lines

    # Held from before the runs are read: two comparisons into one folder would mix their pages.
    quiet_libraries()
    output = home_path(options.output)
    with hold_output(output):
        comparison = compare_runs(options.runs, output, options.baseline, metric=options.metric, command=command)
    print("\n".join([*terminal_lines(comparison), *comparison.notes]))
    print(f"report: {redact(str(output / 'compare.html'))}")
    return ExitCode.OK
