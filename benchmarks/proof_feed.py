"""The part of the proof that feeds: data workers tokenize ahead of the step, as in a run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proof_models import engine_of, shape_of, text_encoder, workload_of
from proof_rows import Finding, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from vembed.batch import Features
    from vembed.losses.base import BatchStructure
    from vembed.models.encoder import Encoder

MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of texts as features, as workers and this process make it."""

    structure: BatchStructure
    parts: tuple[tuple[Features, Any], ...]  # rows and their slots


@dataclass(frozen=True, slots=True)
class TextSource:
    """Random texts of lognormal lengths, median 40 words: a function of the step."""

    encoder: Encoder
    device: torch.device
    pairs: int

    def batch(self, step: int) -> TextBatch:
        """Draw the texts of a step and tokenize them."""
        import numpy as np
        from engine_workload import structure_of_pairs, token_ids

        rng = np.random.default_rng(step)
        rows = token_ids(2 * self.pairs, "mixed", 40, rng)
        texts = [" ".join(f"w{number}" for number in row) for row in np.split(rows.values, rows.lengths.cumsum()[:-1])]
        features = self.encoder.featurize(texts, "document")
        return TextBatch(structure_of_pairs(self.pairs), ((features, np.arange(2 * self.pairs)),))


def texts(setting: Setting) -> Iterator[Finding]:
    """Compare the rate at which workers make batches with that of the steps, then let both run together."""
    import torch

    from vembed.plan.batch import BATCHES_PER_WORKER
    from vembed.training.batches import pools_of
    from vembed.training.loading import BatchLoader

    pairs, steps = (16, 4) if setting.is_small else (2048, 8)
    encoder = text_encoder(shape_of("bert", setting), setting.device, tokenizer=_tokenizer()).train()
    device = torch.device(setting.device)
    source: Any = TextSource(encoder, device, pairs)
    num_workers = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1))
    ahead = BATCHES_PER_WORKER * num_workers

    started = time.perf_counter()
    with BatchLoader(source, num_workers=num_workers, batches_ahead=ahead, num_batches=steps) as loader:
        batches: list[Any] = [loader.batch(step) for step in range(steps)]
    loader_seconds = (time.perf_counter() - started) / steps
    made_here = [source.batch(step) for step in range(steps)]
    equal = [_rows_of(batch) for batch in batches] == [_rows_of(batch) for batch in made_here]
    yield Finding("batches of workers against those of this process", {"equal": equal}, held=equal)

    engine = engine_of(
        workload_of(encoder, setting, 1, torch.bfloat16 if setting.device == "cuda" else None),
        256 if setting.is_small else 16384,
    )
    engine.step(pools_of(batches[0], encoder), batches[0].structure)
    started = time.perf_counter()
    for ready in batches:
        engine.step(pools_of(ready, encoder), ready.structure)
    step_seconds = (time.perf_counter() - started) / steps
    figures = {"loader_seconds": loader_seconds, "step_seconds": step_seconds, "workers": num_workers}
    yield Finding("each alone, for a batch", figures)

    waited = 0.0
    with BatchLoader(source, num_workers=num_workers, batches_ahead=ahead, num_batches=steps) as loader:
        loader.batch(0)  # workers start
        started = time.perf_counter()
        for step in range(1, steps):
            asked = time.perf_counter()
            batch: Any = loader.batch(step)
            waited += time.perf_counter() - asked
            engine.step(pools_of(batch, encoder), batch.structure)
    total = time.perf_counter() - started
    figures = {"step_seconds": total / (steps - 1), "share of waiting (aim: under 0.05)": waited / total}
    yield Finding("together", figures)


def _tokenizer() -> Any:
    """Return a tokenizer of 8,192 words that stand between blanks."""
    from engine_workload import VOCABULARY
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def _rows_of(batch: TextBatch) -> list[list[int]]:
    ((features, _),) = batch.parts
    ids = features.columns["input_ids"]
    return [ids.lengths.tolist(), ids.values.tolist()]
