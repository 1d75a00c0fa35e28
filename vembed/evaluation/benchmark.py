"""Evaluate models on retrieval sets: every model on every set."""

from __future__ import annotations

import gc
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.data.retrieval_sources import load_retrieval
from vembed.data.sources import SourceOptions
from vembed.errors import ConfigError
from vembed.evaluation.bm25 import evaluate_bm25, why_no_bm25
from vembed.evaluation.encode import ItemEncoder
from vembed.evaluation.evaluator import EvaluationOptions, evaluate
from vembed.evaluation.store import write_evaluation
from vembed.gradcache.chunking import ChunkBudget
from vembed.models.registry import load_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.result import EvaluationResult
    from vembed.models.huggingface import ModelOptions

_log = logging.getLogger(__name__)

CPU_TOKENS = 2048
"""Padded tokens of one encoder call on a CPU: small rectangles stay in its caches."""

ACCELERATOR_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """How to evaluate.

    Attributes:
        device: Where the encoders run.
        batch_rows: Most texts of one encoder call.
        split: Split of the sets; None is their test split.
        autocast_dtype: Type of mixed precision, or None.
        with_bm25: Whether BM25 is evaluated too.
        poll: Called in long loops; raises to stop.
    """

    device: torch.device
    batch_rows: int
    split: str | None
    autocast_dtype: torch.dtype | None
    with_bm25: bool
    poll: Callable[[], None]


def run_benchmark(
    models: Sequence[ModelOptions], paths: Sequence[str], output: Path, options: BenchmarkOptions
) -> Iterator[EvaluationResult]:
    """Evaluate every model on every set; results are written as they come.

    Args:
        models: Models to load, one at a time.
        paths: Retrieval sets.
        output: Gets a folder `MODEL/SET` for each result.
        options: How to evaluate.

    Yields:
        Results, model by model.

    Raises:
        VembedError: When a set or a model can't be loaded; all sets are read before the first model is.
    """
    names = folder_names([model.name for model in models])
    tasks = [load_retrieval(path, SourceOptions(role="test", split=options.split)) for path in paths]
    if options.with_bm25:
        for task in tasks:
            if reason := why_no_bm25(task):
                _log.info("%s", reason)
            else:
                yield _kept(evaluate_bm25(task, poll=options.poll), output / "BM25")
    for model, name in zip(models, names, strict=True):
        encoder = load_encoder(model).to(options.device)
        tokens = CPU_TOKENS if options.device.type == "cpu" else ACCELERATOR_TOKENS
        budget = ChunkBudget(options.batch_rows, tokens, 1 if options.device.type == "cpu" else 8)
        encode = ItemEncoder(encoder, budget, options.device, options.autocast_dtype, poll=options.poll)
        for task in tasks:
            yield _kept(_evaluate(encode, task, model.name, options), output / name)
        del encoder, encode
        gc.collect()  # two large models don't fit at once


def _evaluate(encode: ItemEncoder, task: RetrievalData, system: str, options: BenchmarkOptions) -> EvaluationResult:
    before = dict(encode.num_truncated)
    result = evaluate(encode, task, EvaluationOptions(system=system, poll=options.poll))
    notes = [
        f"{count - before[side]} texts on the {side} side are longer than the model's {encode.encoder.max_length} "
        f"tokens and were cut."
        for side, count in encode.num_truncated.items()
        if count > before[side]
    ]
    return replace(result, notes=(*result.notes, *notes))


def _kept(result: EvaluationResult, folder: Path) -> EvaluationResult:
    write_evaluation(folder / _plain(result.task), result)
    return result


def folder_names(names: Sequence[str]) -> list[str]:
    """Return a folder name for each model: as many last parts of its path as tell it from the others.

    Raises:
        ConfigError: When a model is named twice.
    """
    parts = [Path(name).resolve().parts if Path(name).is_dir() else tuple(name.split("/")) for name in names]
    if len(set(parts)) < len(parts):
        repeated = next(name for name, own in zip(names, parts, strict=True) if parts.count(own) > 1)
        raise ConfigError(f"{repeated} is named twice")
    chosen = []
    for own in parts:
        others = [other for other in parts if other != own]
        length = 1 if Path("/".join(own)).is_absolute() else len(own)
        while any(other[-length:] == own[-length:] for other in others) and length < len(own):
            length += 1
        chosen.append(_plain("/".join(own[-length:])))
    return chosen


def _plain(name: str) -> str:
    """Return a name with anything but plain characters replaced."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._") or "model"
