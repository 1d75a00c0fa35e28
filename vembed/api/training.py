"""Train from Python and compare runs: `train`, the result that it returns, `compare`, and a peer's `Trainer`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from vembed.api.arguments import errors_name_arguments
from vembed.api.model import load
from vembed.batch import ImageLimits
from vembed.config.load import load_values
from vembed.config.schema import Config
from vembed.data.keys import Source
from vembed.data.python_rows import ROWS_FOLDER, write_rows
from vembed.data.run_data import SUGGESTED_SET
from vembed.distributed.lock import hold_output
from vembed.distributed.process_env import process_env
from vembed.distributed.watchdog import Watchdog
from vembed.errors import ConfigError, DataError, MachineError
from vembed.files import home_path
from vembed.losses.registry import register_loss
from vembed.pages.html import notebook_frame
from vembed.redact import redact
from vembed.terminal import printed_lines
from vembed.training.callbacks import Callbacks
from vembed.training.finish import RunResult as FinishedRun
from vembed.training.output import OutputFolder
from vembed.training.run import run_from_config
from vembed.training.trackers import read_rows
from vembed.workflows.comparison.compare import compare_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.api.keys import TrainKeys
    from vembed.api.model import EmbeddingModel
    from vembed.config.load import LoadedConfig
    from vembed.data.python_rows import RowsInput
    from vembed.losses.base import BatchLoss
    from vembed.training.callbacks import Callback
    from vembed.workflows.comparison.compare import RunComparison

_KEY_OF = {
    "model": "model_name",
    "loss": "loss_type",
    "data": "data_path",
    "val_data": "val_data_path",
    "test_data": "test_data_path",
}
"""Argument -> the key that it stands for; of data, where they are a path."""

_SHOWN = ("verdict", "curves", "queries")
"""Sections of the report that a notebook shows, by their ids."""

_STEP_CURVES = {"loss": "loss", "learning_rate": "learning rate"}


def train(
    config: str | Path | Mapping[str, object] | Config | None = None,
    /,
    *,
    model: str | Path | None = None,
    data: RowsInput | str | Path | None = None,
    val_data: RowsInput | str | Path | None = None,
    test_data: RowsInput | str | Path | None = None,
    loss: str | type[BatchLoss] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **keys: Unpack[TrainKeys],
) -> RunResult:
    """Train a model, as `vembed train` does, in this process.

    In a script that torchrun or accelerate launch started, the processes train together.

    Args:
        config: A YAML or JSON file, key -> value, or a `Config`; None where the other arguments say everything.
        model: As the key `model_name`.
        data: Rows in memory (dictionaries in any iterable, a pandas, datasets, Arrow or polars table), a path as in
            `data_path`, or a list of sources as in the key `data`. Rows are written into the output folder.
        val_data: Likewise, of the dev set.
        test_data: Likewise, of the test set.
        loss: As the key `loss_type`, or the class of a loss of your own, which is registered.
        callbacks: Functions of an event, or objects with some of the methods `on_step`, `on_evaluation`, `on_save` and
            `on_end`; they may return `vembed.Stop` or `vembed.LearningRate`.
        quiet: Whether to print nothing. A program that has set logging up gets the lines there instead.
        keys: Keys that win over `config`, e.g. `batch_size=32`.

    Returns:
        The verdict, the evaluations before and after, the output folder, the model and the report.

    Raises:
        VembedError: As the command line; `exit_code` is the code that it would have ended with.
        Exception: What a callback has raised; the same call continues after its step.
    """
    asked = Callbacks(callbacks)
    # Every argument becomes a key, so that one set of rules and messages judges them all.
    overrides: dict[str, object] = dict(keys)
    rows: dict[str, Any] = {}  # argument -> rows in memory; their file gets its path below
    loss = register_loss(loss).keys.name if isinstance(loss, type) else loss
    arguments = {"model": model, "loss": loss, "data": data, "val_data": val_data, "test_data": test_data}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    for name, value in arguments.items():
        key = _KEY_OF[name]
        if name == "data" and _lists_sources(value):
            overrides["data"] = value
            continue
        if key in overrides:
            raise ConfigError(f"{name} and {key} say the same thing; keep one of them")
        is_rows = name.endswith("data") and not _is_path(value)
        overrides[key] = name if is_rows else value
        rows |= {name: value} if is_rows else {}
    base = _base(config)
    if config is None and not overrides.keys() & {"model_name", "model_name_or_path", "text_model_name"}:
        raise ConfigError('model is missing: a hub id, a folder, or one from scratch, model="builtin:ngram-bag"')
    files: dict[str, Path] = {}  # argument -> the file of its rows
    # Messages speak of keys. Who gave arguments reads of those, and who gave keys of keys.
    with errors_name_arguments({_KEY_OF[name]: name for name in arguments}, files), ExitStack() as held:
        # First with the names of the arguments as paths: a wrong key is refused before rows are written anywhere.
        loaded = load_values(base, overrides)
        if loaded.config.data is None and loaded.config.data_path is None:
            raise DataError(f'data is missing: rows, a path, or a set that is built in, data="{SUGGESTED_SET}"')
        if not quiet and not logging.getLogger("vembed").hasHandlers():
            held.enter_context(printed_lines(errors_only=process_env().rank > 0))
        if rows:
            if process_env().rank == 0:  # with several, the first one holds the folder for all
                held.enter_context(hold_output(Path(loaded.config.output_dir)))
            made = held.enter_context(_rows_of_runs_only(Path(loaded.config.output_dir)))
            files |= _written(rows, loaded.config, made)
            overrides |= {_KEY_OF[name]: str(path) for name, path in files.items()}
            # Then with the files of the rows. Their names are hashes of what they hold: the same call continues.
            loaded = load_values(base, overrides)
        return _run(loaded, _command(config, overrides), asked)


@dataclass(frozen=True, repr=False)
class RunResult(FinishedRun):
    """Verdict and results of a finished run, with its model and report."""

    @classmethod
    def of(cls, finished: FinishedRun) -> Self:
        """Return a run's own result as the caller gets it."""
        return cls(**{each.name: getattr(finished, each.name) for each in fields(finished)})

    @property
    def report(self) -> Path:
        """The report, a page that needs no network; report.md and report.json lie beside it."""
        return self.output / "report" / "report.html"

    @cached_property
    def model(self) -> EmbeddingModel:
        """The trained model, loaded when it is first asked for.

        Raises:
            VembedError: It can't be loaded.
        """
        return load(OutputFolder(self.output).model)

    def _repr_html_(self) -> str | None:
        """Return verdict, curves and examples of the report for a notebook, in a frame that keeps their style apart."""
        try:
            page = self.report.read_text("utf-8")
        except OSError:
            return None  # the notebook shows `repr` then
        head, _, body = page.partition("</head>")
        sections = [re.search(rf'<section [^>]*id="{name}".*?</section>', body, re.DOTALL) for name in _SHOWN]
        shown = "\n".join(found[0] for found in sections if found is not None)
        return notebook_frame(f"{head}</head>\n<body><main>\n{shown}\n</main></body></html>", title=repr(self))

    def plot(self) -> Any:
        """Draw loss, learning rate and the dev metric over the steps.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows and `savefig` writes.

        Raises:
            DataError: The run has no steps and no evaluations any more.
            MachineError: matplotlib isn't installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MachineError("plot() needs matplotlib; install it with: pip install matplotlib") from error

        # Made here, as matplotlib is no dependency: nothing imports it before a plot is asked for.
        class Plot(Figure):
            """A figure that a notebook shows, whatever matplotlib's backend is."""

            def _repr_png_(self) -> bytes:
                buffer = BytesIO()
                self.savefig(buffer, format="png")
                return buffer.getvalue()

        rows = read_rows(self.output / "metrics.jsonl")
        curves = {
            label: [(row["step"], row[name]) for row in rows if name in row] for name, label in _STEP_CURVES.items()
        }
        page, metric = self.report.with_suffix(".json"), self.metric
        evaluations = json.loads(page.read_text("utf-8"))["evaluations"] if page.is_file() else []
        curves[f"dev {metric}"] = [(each["step"], each["metrics"][metric]) for each in evaluations]
        curves = {name: points for name, points in curves.items() if points}
        if not curves:
            raise DataError(f"{self.output} has nothing to draw: its metrics.jsonl has no steps")
        figure = Plot(figsize=(4.5 * len(curves), 3), layout="constrained")
        for axes, (name, points) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None)
            axes.set(xlabel="step", ylabel=name)
            axes.grid(alpha=0.3)
        return figure


class Trainer:
    """A model that is about to be trained; `keys` are those of the configuration."""

    def __init__(self, model: str | Path, **keys: Unpack[TrainKeys]) -> None:
        self.model = model
        self.keys = keys

    def train(
        self, data: RowsInput | str | Path | None = None, *, callbacks: Sequence[Callback] = (), **keys: Any
    ) -> RunResult:
        """Train, as `vembed.train` does; its arguments are taken here too, and win over those of `Trainer`."""
        return train(dict(self.keys), model=self.model, data=data, callbacks=callbacks, **keys)


def compare(
    runs: str | Path | RunResult | Sequence[str | Path | RunResult],
    output: str | Path | None = None,
    *,
    baseline: str | Path | RunResult | None = None,
    metric: str | None = None,
) -> RunComparison:
    """Compare runs: settings and data, metrics with paired tests, curves, time and memory, queries won and lost.

    Args:
        runs: Output folders, patterns such as "runs/*", or what `train` returned; one or several.
        output: Folder for compare.html, compare.md and compare.json; None writes nothing.
        baseline: What the others are compared with; None takes the first.
        metric: What to compare by; None takes what the baseline chose its checkpoint by.

    Raises:
        ConfigError: There are fewer than two runs, or one isn't a run.
        MachineError: The output can't be written.
    """
    several = [runs] if isinstance(runs, (str, Path, RunResult)) else runs
    folders = [run.output if isinstance(run, RunResult) else run for run in several]
    first = baseline.output if isinstance(baseline, RunResult) else baseline
    if output is None:
        return compare_runs(folders, None, first, metric=metric)
    with hold_output(home_path(output)):
        return compare_runs(folders, home_path(output), first, metric=metric)


# Arguments


def _base(config: str | Path | Mapping[str, object] | Config | None) -> Path | Mapping[str, object]:
    # Only the keys that were set: a default that is passed on would count as the caller's own choice.
    if isinstance(config, Config):
        return config.model_dump(include=config.model_fields_set)
    if config is None:
        return {}
    return Path(config) if isinstance(config, str) else config


def _is_path(data: object) -> bool:
    """Return whether data are named by a path, or by a list of paths, and are not rows."""
    # A list of texts could be rows of one column as well; training rows have two, so it is a list of paths.
    several = isinstance(data, (list, tuple)) and bool(data) and all(isinstance(each, (str, Path)) for each in data)
    return several or isinstance(data, (str, Path))


def _lists_sources(data: object) -> bool:
    """Return whether a list is one of sources, as the key `data` has it, and not of rows."""
    return (
        isinstance(data, (list, tuple))
        and bool(data)
        and all(isinstance(each, Mapping) and "path" in each and each.keys() <= {*Source.model_fields} for each in data)
    )


def _written(rows: Mapping[str, Any], config: Config, made: list[Path]) -> Iterator[tuple[str, Path]]:
    """Write rows in memory into the output folder; yield each argument's name with the path of its file.

    Args:
        made: Gets the files that weren't there before.
    """
    folder, limits = Path(config.output_dir) / ROWS_FOLDER, ImageLimits(max_pixels=config.max_image_pixels)
    for name, given in rows.items():
        # A file's name is the hash of its rows: one that was there before is another run's too, and must stay.
        before = {*folder.glob("*.jsonl")}
        path = write_rows(given, folder, name, limits)
        made += [path] if path not in before else []
        yield name, path


@contextmanager
def _rows_of_runs_only(output: Path) -> Iterator[list[Path]]:
    """Take files of rows, and delete those that no run in the folder reads, where the call is refused."""
    folder, made = output / ROWS_FOLDER, list[Path]()
    is_new = not folder.exists()
    try:
        yield made
    # Rows of a run that was refused belong to nobody; those that an earlier run reads stay.
    except BaseException:
        config = output / "config.yaml"
        read = config.read_text("utf-8") if config.is_file() else ""
        for path in made:
            if path.name not in read:
                path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # it holds rows
                folder.rmdir()
        raise


def _command(config: object, overrides: Mapping[str, object]) -> str:
    """Return the call that repeats the run."""
    words = [] if config is None else [repr(str(config)) if isinstance(config, (str, Path)) else "config"]
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in overrides.items()}
    return redact(f"vembed.train({', '.join([*words, *(f'{name}={value!r}' for name, value in plain.items())])})")


def _run(loaded: LoadedConfig, command: str, callbacks: Callbacks) -> RunResult:
    watchdog = Watchdog()
    try:
        result = run_from_config(
            loaded.config,
            command=command,
            sources=loaded.sources,
            notes=loaded.notes,
            watchdog=watchdog,
            callbacks=callbacks,
        )
    except BaseException:
        watchdog.stop(together=False)
        raise
    watchdog.stop()
    assert result is not None  # only a plan or a dry run has none
    return RunResult.of(result)
