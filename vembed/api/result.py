"""What `vembed.train` returns: the verdict and where everything lies, shown in a line, a notebook cell or a plot."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from vembed.api.model import load
from vembed.errors import DataError, MachineError
from vembed.pages.html import notebook_frame
from vembed.training.finish import RunResult as FinishedRun
from vembed.training.output import OutputFolder
from vembed.training.trackers import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.api.model import EmbeddingModel

_SHOWN = ("verdict", "curves", "queries")
"""Sections of the report that a notebook shows, by their ids."""

_STEP_CURVES = {"loss": "loss", "learning_rate": "learning rate"}


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
            from vembed.api.plots import draw_curves
        except ImportError as error:
            raise MachineError("plot() needs matplotlib; install it with: pip install matplotlib") from error
        return draw_curves(self._curves())

    def _curves(self) -> dict[str, list[tuple[float, float]]]:
        """Return (step, value) of each curve that has values."""
        rows = read_rows(self.output / "metrics.jsonl")
        curves = {
            label: [(row["step"], row[name]) for row in rows if name in row] for name, label in _STEP_CURVES.items()
        }
        page, metric = self.report.with_suffix(".json"), self.metric
        evaluations = json.loads(page.read_text("utf-8"))["evaluations"] if page.is_file() else []
        curves[f"dev {metric}"] = [(each["step"], each["metrics"][metric]) for each in evaluations]
        found = {name: points for name, points in curves.items() if points}
        if not found:
            raise DataError(f"{self.output} has nothing to draw: its metrics.jsonl has no steps")
        return found
