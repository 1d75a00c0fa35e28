"""vembed fine-tunes embedding models for retrieval: one YAML in, a trained model and a retrieval report out.

From Python: `train`, `load`, `evaluate`, `build_index` and `open_index` (docs/python.md). Importing this package
imports no torch, so that `vembed train --validate` answers at once; the functions bring it along when first asked for.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.api.model import EmbeddingModel, Predictor, load
    from vembed.api.retrieval import EvaluationResult, Hit, IndexMeta, Searcher, build_index, evaluate, open_index
    from vembed.api.training import RunResult, Trainer, compare, train
    from vembed.config.schema import Config
    from vembed.data.builtin import register_dataset
    from vembed.data.formats import register_format
    from vembed.entrypoints.command import register_command
    from vembed.entrypoints.options import register_options
    from vembed.errors import ConfigError, DataError, MachineError, NonFiniteError, PreemptedError, VembedError
    from vembed.evaluation.metrics import register_metric
    from vembed.evaluation.report import register_section
    from vembed.losses.registry import register_loss
    from vembed.models.export_formats import register_export
    from vembed.models.load import register_encoder
    from vembed.models.vision_language_families import register_family
    from vembed.training.callbacks import EndEvent, EvaluationEvent, LearningRate, SaveEvent, StepEvent, Stop
    from vembed.training.trackers import register_tracker
    from vembed.workflows.comparison.compare import RunComparison
    from vembed.workflows.search.output import register_index_format

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "EmbeddingModel",
    "EndEvent",
    "EvaluationEvent",
    "EvaluationResult",
    "Hit",
    "IndexMeta",
    "LearningRate",
    "MachineError",
    "NonFiniteError",
    "Predictor",
    "PreemptedError",
    "RunComparison",
    "RunResult",
    "SaveEvent",
    "Searcher",
    "StepEvent",
    "Stop",
    "Trainer",
    "VembedError",
    "__version__",
    "build_index",
    "compare",
    "evaluate",
    "load",
    "open_index",
    "register_command",
    "register_dataset",
    "register_encoder",
    "register_export",
    "register_family",
    "register_format",
    "register_index_format",
    "register_loss",
    "register_metric",
    "register_options",
    "register_section",
    "register_tracker",
    "train",
]

_MODULES = {
    "vembed.api.model": ("EmbeddingModel", "Predictor", "load"),
    "vembed.api.retrieval": (
        *("EvaluationResult", "Hit", "IndexMeta", "Searcher"),
        *("build_index", "evaluate", "open_index"),
    ),
    "vembed.api.training": ("RunResult", "Trainer", "compare", "train"),
    "vembed.workflows.comparison.compare": ("RunComparison",),
    "vembed.workflows.search.output": ("register_index_format",),
    "vembed.config.schema": ("Config",),
    "vembed.errors": (
        *("ConfigError", "DataError", "MachineError", "NonFiniteError", "PreemptedError", "VembedError"),
    ),
    "vembed.data.builtin": ("register_dataset",),
    "vembed.data.formats": ("register_format",),
    "vembed.entrypoints.command": ("register_command",),
    "vembed.entrypoints.options": ("register_options",),
    "vembed.evaluation.metrics": ("register_metric",),
    "vembed.evaluation.report": ("register_section",),
    "vembed.losses.registry": ("register_loss",),
    "vembed.models.export_formats": ("register_export",),
    "vembed.models.load": ("register_encoder",),
    "vembed.models.vision_language_families": ("register_family",),
    "vembed.training.callbacks": (*("EndEvent", "EvaluationEvent", "LearningRate", "SaveEvent", "StepEvent", "Stop"),),
    "vembed.training.trackers": ("register_tracker",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
"""Public name -> the module that has it; those of config and errors need no torch."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running: it visits each of the million objects that imports, or rows, make.

    They stay, or hold no cycles; blocks may stand in each other.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():
        value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
