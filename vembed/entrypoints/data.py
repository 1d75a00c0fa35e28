"""`vembed data check PATH [--against TEST]` and `vembed data show PATH`: what is in a data set, and what is wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.options import ModelOptions, Options, PictureOptions, RowOptions, check, parse_action
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path
from vembed.redact import redact
from vembed.registry import LOSSES
from vembed.section import Count, option, word
from vembed.text import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.keys import Role
    from vembed.data.read import DataSource
    from vembed.vectors.encode import ItemEncoder


class RowsOptions(RowOptions):
    """Rows, and the loss that reads them."""

    path: str = word("PATH", "training data: anything that the key data_path accepts")
    loss_type: str | None = option(
        None, "loss whose columns are read; default: infonce, with --label-kind pair or grade cosent", metavar="NAME"
    )
    model: str | None = option(
        None,
        "count tokens with this model; check also looks for unlabelled answers with it",
        metavar="MODEL",
    )


class CheckOptions(RowsOptions, ModelOptions, PictureOptions):
    """Find the problems of a data set: unusable rows, duplicates, contradictions, broken pictures and, with --against,
    leaks into an evaluation. Report text lengths, languages and class balance.
    """  # noqa: D205 - the sentence that --help prints

    epilog = (
        "Exit code: 0 without errors, 3 with errors (unusable rows, broken pictures, contradictions, leaked queries). "
        "With --strict, warnings count as errors; notes never do. 2: wrong option; 5: this machine can't do it."
    )

    against: list[str] = option([], "evaluation data whose queries must not be in PATH", metavar="TEST")
    against_split: str | None = option(None, "split of the evaluation data; default: the test split", metavar="SPLIT")
    as_json: Path | None = option(
        None, "write all findings with examples as JSON", metavar="FILE", spellings=["--json"]
    )
    html: Path | None = option(None, "write all findings as an HTML page", metavar="FILE")
    strict: bool = option(False, "also exit with 3 on warnings")
    batch_size: Count = option(256, "largest number of items per encoder call", metavar="N")


class ShowOptions(RowsOptions, ModelOptions, PictureOptions):
    """Print rows as training sees them."""

    rows: Count = option(3, "number of rows; default: 3", metavar="N")


ACTIONS: Mapping[str, tuple[type[Options], str]] = {
    "check": (CheckOptions, "find problems"),
    "show": (ShowOptions, "print a few rows"),
}


def main(arguments: Sequence[str], *, program: str) -> int:
    """Check a data set, or show some of its rows."""
    description = "Check training data, or show some of it."
    action, given = parse_action(description, ACTIONS, arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _check(given, command) if action == "check" else _show(given))


def _check(given: Mapping[str, Any], command: str) -> int:
    options = check(CheckOptions, given)
    rows = _source(options, options.path, "train", options.split)
    against = [_source(options, path, "test", options.against_split) for path in dict.fromkeys(options.against)]
    for source in (rows, *against):  # before a model is loaded, which takes seconds
        source.refuse_missing()
    from vembed.pages.html import render_html
    from vembed.pages.write import write_files
    from vembed.workflows.data_check.check import check_data
    from vembed.workflows.data_check.report import check_json, check_page, terminal_lines

    encode = _encoder(options, options.batch_size)
    # Rows and vectors that don't fit memory go there.
    with tempfile.TemporaryDirectory(prefix="vembed-check-") as folder:
        checked = check_data(rows, against, Path(folder), encode)
        for line in terminal_lines(checked):
            print(visible(redact(line)))
        page = check_page(checked, command)
        for path, render in ((options.as_json, check_json), (options.html, render_html)):
            if path is not None:
                file = home_path(path)
                write_files(file.parent, {file.name: render(page)}, what="the check")
                print(f"written to {redact(str(path))}")
        return checked.exit_code(strict=options.strict)


def _show(given: Mapping[str, Any]) -> int:
    options = check(ShowOptions, given)
    rows = _source(options, options.path, "train", options.split)
    rows.refuse_missing()
    from vembed.workflows.data_check.report import shown_rows

    encode = _encoder(options, 1)  # it only counts tokens
    for line in shown_rows(rows, options.rows, None if encode is None else encode.encoder):
        print(visible(redact(line)))
    return ExitCode.OK


def _source(options: CheckOptions | ShowOptions, path: str, role: Role, split: str | None) -> DataSource:
    """Return a data set, read as a configuration with the same keys would have it."""
    from vembed.data.read import DataSource
    from vembed.losses.registry import RunLoss

    name = options.loss_type or ("cosent" if options.label_kind in ("pair", "grade") else "infonce")
    # Which columns are read follows from the loss: another one reads other columns of the same rows.
    if name not in LOSSES:
        LOSSES.load(name)  # refuses it with the nearest name
    named = ("PATH", "--split") if role == "train" else ("--against", "--against-split")
    keys = options.row_keys(max_image_pixels=options.max_image_pixels)
    return DataSource(path, role, keys, split=split, loss=RunLoss.chosen(name, {}).needs(), user_names=named)


def _encoder(options: CheckOptions | ShowOptions, batch_size: int) -> ItemEncoder | None:
    given = options.load_options()
    if options.model is None:
        for name in given:
            if name != "max_image_pixels":
                raise ConfigError(f"--{name.replace('_', '-')} has an effect only with --model")
        return None
    from vembed.api.model import load

    quiet_libraries()
    return load(options.model, **given).item_encoder(batch_size)
