"""`vembed data check PATH [--against TEST]` and `vembed data show PATH`: what is in a data set, and what is wrong."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.model_arguments import add_model_arguments, add_picture_argument, load_options
from vembed.entrypoints.row_arguments import add_row_arguments, row_keys
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path
from vembed.redact import redact
from vembed.registry import LOSSES
from vembed.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.data.splits import Role, SourceOptions
    from vembed.evaluation.encode import ItemEncoder

DESCRIPTION = "Check training data, or show some of it."

CHECK_DESCRIPTION = (
    "Find the problems of a data set: unusable rows, duplicates, contradictions, broken pictures and, with --against, "
    "leaks into an evaluation. Report text lengths, languages and class balance."
)
CHECK_EPILOG = (
    "Exit code: 0 without errors, 3 with errors (unusable rows, broken pictures, contradictions, leaked queries). With "
    "--strict, warnings count as errors; notes never do. 2: wrong option; 5: this machine can't do it."
)


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of a look at data."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    commands = parser.add_subparsers(dest="action", required=True, metavar="check|show")
    check = commands.add_parser("check", description=CHECK_DESCRIPTION, epilog=CHECK_EPILOG, help="find problems")
    show = commands.add_parser("show", description="Print rows as training sees them.", help="print a few rows")
    for each in (check, show):
        _add_data_arguments(each)
    check.add_argument(
        "--against",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEST",
        help="evaluation data whose queries must not be in PATH",
    )
    check.add_argument("--against-split", metavar="SPLIT", help="split of the evaluation data; default: the test split")
    check.add_argument("--json", type=Path, metavar="FILE", help="write all findings with examples as JSON")
    check.add_argument("--html", type=Path, metavar="FILE", help="write all findings as an HTML page")
    check.add_argument("--strict", action="store_true", help="also exit with 3 on warnings")
    check.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="largest number of items per encoder call"
    )
    show.add_argument("--rows", type=int, default=3, metavar="N", help="number of rows; default: 3")
    return parser.parse_args(arguments)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="training data: anything that the key data_path accepts")
    add_row_arguments(parser)
    parser.add_argument(
        "--loss-type",
        metavar="NAME",
        help="loss whose columns are read; default: infonce, with --label-kind pair or grade cosent",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="count tokens with this model; check also looks for unlabelled answers with it"
    )
    add_model_arguments(parser)
    add_picture_argument(parser)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Check a data set, or show some of its rows."""
    parsed = parse_arguments(arguments, program=program)
    command = command_line(program, arguments)
    return run_command(partial(_check, parsed, command) if parsed.action == "check" else partial(_show, parsed))


def _check(parsed: argparse.Namespace, command: str) -> int:
    options = _options(parsed, "train", parsed.split)
    against = dict.fromkeys(parsed.against, _options(parsed, "test", parsed.against_split))
    _refuse_missing({parsed.path: options, **against})
    from vembed.data_check.check import check_data
    from vembed.data_check.report import check_page, terminal_lines, write_html, write_json

    encode = _encoder(parsed)
    with tempfile.TemporaryDirectory(prefix="vembed-check-") as folder:
        check = check_data(parsed.path, options, against, Path(folder), encode)
        for line in terminal_lines(check):
            print(visible(redact(line)))
        page = check_page(check, command)
        for path, write in ((parsed.json, write_json), (parsed.html, write_html)):
            if path is not None:
                write(home_path(path), page)
                print(f"written to {redact(str(path))}")
        return check.exit_code(strict=parsed.strict)


def _show(parsed: argparse.Namespace) -> int:
    if parsed.rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {parsed.rows}")
    options = _options(parsed, "train", parsed.split)
    _refuse_missing({parsed.path: options})
    from vembed.data_check.show import shown_rows

    encode = _encoder(parsed)
    for line in shown_rows(parsed.path, options, parsed.rows, None if encode is None else encode.encoder):
        print(visible(redact(line)))
    return ExitCode.OK


def _options(parsed: argparse.Namespace, role: Role, split: str | None) -> SourceOptions:
    """Return how the data are read, as a configuration with the same keys would have it."""
    from vembed.data.splits import SourceOptions
    from vembed.losses.registry import RunLoss

    name = parsed.loss_type or ("cosent" if parsed.label_kind in ("pair", "grade") else "infonce")
    if name not in LOSSES:
        LOSSES.load(name)  # refuses it with the nearest name
    named = ("PATH", "--split") if role == "train" else ("--against", "--against-split")
    return SourceOptions(role, split, row_keys(parsed), RunLoss.chosen(name, {}).needs(), named=named)


def _refuse_missing(sources: dict[str, SourceOptions]) -> None:
    """Refuse paths that lead nowhere before a model is loaded, which takes seconds."""
    from vembed.data.sources import refuse_missing

    for path, options in sources.items():
        refuse_missing(path, options)


def _encoder(parsed: argparse.Namespace) -> ItemEncoder | None:
    """Load the model, where there is one."""
    options = load_options(parsed)
    if parsed.model is None:
        for name in options:
            if name != "max_image_pixels":
                raise ConfigError(f"--{name.replace('_', '-')} has an effect only with --model")
        return None
    if getattr(parsed, "batch_size", 1) < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    from vembed.api.model import load

    quiet_libraries()
    return load(parsed.model, **options).item_encoder(getattr(parsed, "batch_size", 1))
