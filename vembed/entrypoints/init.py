"""`vembed init [DATA] [-o FILE]`: write a configuration for rows, and a model and test sets, with comments."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.config.documents import write_mapping
from vembed.config.load import load_config
from vembed.config.messages import checked_section, key_schemas
from vembed.entrypoints.command import run_command
from vembed.entrypoints.options import Options, check, parse_words
from vembed.errors import ConfigError, DataError, ExitCode, MachineError
from vembed.files import home_path
from vembed.models.names import scratch_rate
from vembed.redact import printable
from vembed.section import option, word
from vembed.text import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.columns import ColumnsRead

BUILTIN_DATA = "builtin:stdlib-code"
TEXT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PICTURE_MODEL = "openai/clip-vit-base-patch32"
USUAL = ("epochs", "batch_size", "learning_rate")
"""Keys that most runs change; they are written with their defaults."""

SCRATCH_EPOCHS = 10
"""Passes over the data of a model that starts from random weights."""

FEW_ROWS = 1_000
"""Rows read to choose a batch that a small set fills several times."""


class InitOptions(Options):
    """Write a configuration that trains on DATA: the keys that most runs set, chosen from the columns of the data, each
    with a comment.
    """  # noqa: D205 - the sentence that --help prints

    data: str | None = word("DATA", "training data: file, folder or hub id; default: a built-in set", None)
    model: str | None = option(
        None, "as model_name takes it; default: one that fits the columns of the data", metavar="MODEL"
    )
    test: list[str] | None = option(
        None, "sets of the verdict, as test_data_path takes them; default: none", metavar="SET"
    )
    output: Path = option(Path("config.yaml"), "default: config.yaml", metavar="FILE", spellings=["-o", "--output"])
    overwrite: bool = option(False, "replace FILE if it is there")


OPTIONS = InitOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Write a configuration for your data."""
    given = parse_words(InitOptions, arguments, program=program)
    return run_command(lambda: _run(given))


def _run(given: Mapping[str, Any]) -> int:
    options = check(InitOptions, given)
    output = home_path(options.output)
    if output.exists() and not options.overwrite:
        raise ConfigError(f"{output} is there already; name another file with -o, or add --overwrite")
    from vembed.training.early import refuse_wrong_run

    values, comments = _chosen(options.data or BUILTIN_DATA, options.model, options.test)
    lines = [f"# Train with: vembed train {output}", "# What a key does: vembed explain KEY", ""]
    for name, value in values.items():
        written = write_mapping({name: value}).strip()
        meaning = str(key_schemas()[name]["description"]).partition(". ")[0].rstrip(".")
        # A quoted name of a CSV column may hold a line break, which would end the comment.
        lines.append(f"{written}  # {printable(comments.get(name) or meaning)}")
    # The file appears only once it is valid; a draft that fails is gone, and what stood there before is untouched.
    draft = output.with_name(f".{os.getpid()}-{output.name}")  # of the same suffix, which a configuration goes by
    try:
        draft.write_text("\n".join([*lines, ""]), "utf-8")
        refuse_wrong_run(load_config(draft).config)
        draft.replace(output)
    except OSError as error:
        raise MachineError(f"{output} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    if guess := values.get("column_mapping"):
        taken = ", ".join(f"{ours} from {cut(theirs)}" for theirs, ours in guess.items())
        print(f"Guessed from the order of the columns: {taken}: change column_mapping if that's wrong")
    print(f"{output} is written and valid. Train with: vembed train {output}")
    return ExitCode.OK


def _chosen(data: str, model: str | None, test: list[str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the keys to write, and the comments of those that the data have decided.

    Args:
        model: What the user named; None for one that fits the data.
        test: Sets of the verdict.
    """
    columns, mapping, rows = _look(data)
    shows = any(name.endswith(("_image", "_images")) for name in columns.used)
    name = Path(data.removeprefix("builtin:")).name.partition(".")[0] or "run"
    values: dict[str, Any] = {"model_name": model or (PICTURE_MODEL if shows else TEXT_MODEL), "data_path": data}
    if test:
        values["test_data_path"] = test[0] if len(test) == 1 else test
    comments = {
        "model_name": "the model to start from: a hub id, a folder, or the output folder of a run",
        "output_dir": "gets the model in model/ and the report in report/",
    }
    if columns.used:
        read = [(" and ".join(theirs), ours) for ours, theirs in columns.used.items()]
        comments["data_path"] = (
            f"columns {', '.join(each if each == ours else f'{each} as {ours}' for each, ours in read)}"
        )
    if mapping:
        values["column_mapping"] = mapping
        comments["column_mapping"] = "guessed from the order of the columns: column of the data -> what it is here"
    values |= _supervision(columns, rows)
    values |= {key: key_schemas()[key]["default"] for key in USUAL}
    if (rate := scratch_rate(values["model_name"])) is not None:
        values |= {"epochs": SCRATCH_EPOCHS, "learning_rate": rate}
        comments["epochs"] = "passes over the training data; many, as the model starts from random weights"
        comments["learning_rate"] = "peak, after the warmup; high, as the model starts from random weights"
    # In-batch negatives need other rows: an epoch should be at least four batches.
    while len(rows) < FEW_ROWS and rows and values["batch_size"] > max(2, len(rows) // 4):
        values["batch_size"] //= 2
    values["output_dir"] = f"runs/{name}"
    return values, comments


def _look(data: str) -> tuple[ColumnsRead, dict[str, str], list[dict[str, Any]]]:
    """Return how the columns of local files of rows are read, a mapping where it takes one, and the first rows.

    Of sets of another kind there is nothing to be looked at.
    """
    from vembed.data.columns import COLUMNS
    from vembed.data.keys import DataKeys
    from vembed.data.read import DataSource

    source = DataSource(data, "train", user_names=("DATA", "data_split"))
    source.refuse_missing()
    rows = source.raw_rows(FEW_ROWS)
    known = {name for ours, others in COLUMNS.items() for name in (ours, *others)}
    unknown = [name for name in (rows[0] if rows else ()) if name not in known]
    try:
        return source.peek()[0], {}, rows
    except DataError:
        if len(unknown) != 2:
            raise
    for name in unknown:
        cells = [row[name] for row in rows if row.get(name) not in (None, "")]
        if cells and all(_number(cell) is not None for cell in cells):
            raise DataError(
                f"{data}: column {name!r} holds only numbers, so it is no text to train on: name the columns of texts "
                "query and positive"
            )
    mapping = dict(zip(unknown, ("query", "positive"), strict=True))
    mapped = DataSource(data, "train", checked_section(DataKeys, {"column_mapping": mapping}))
    return mapped.peek()[0], mapping, rows


def _supervision(columns: ColumnsRead, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the keys that say what numbers beside two texts mean."""
    label = next(iter(columns.used.get("label", ())), None)
    if label is None:
        return {}
    cells = [row[label] for row in rows if row.get(label) not in (None, "")]
    numbers = [number for cell in cells if (number := _number(cell)) is not None]
    if not numbers or len(numbers) < len(cells):
        return {}
    # 0 and 1 beside two texts are yes and no; only numbers between or beyond them are grades.
    if set(numbers) <= {0, 1}:
        kind = "pair"
    elif {"query", "positive"} <= {*columns.used} or any(number != int(number) for number in numbers):
        kind = (
            "grade"  # beside two texts even of whole numbers: as classes, all pairs of one score would belong together
        )
    else:
        kind = "class"
    return {"label_kind": kind} | ({} if kind == "class" else {"loss_type": "cosent"})


def _number(cell: object) -> float | None:
    """Return the number of a label, which a table writes as a text."""
    try:
        number = float(cell) if isinstance(cell, (str, int, float)) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
