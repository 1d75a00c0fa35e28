"""Compare one training step: vembed's engine, sentence-transformers' cached loss, GradCache's padding, and no caching.

Every variant gets the same weights and the same batch of (query, document) pairs and leaves the gradients of the same
loss. The lengths are lognormal (median 40 tokens, sigma 0.7, at most 256) or all equal. Variants are interleaved: one
step of each behind a warm-up, then the next round; the table has the median. Before that each variant's gradients are
compared with those of the plain step, without dropout.

    OMP_NUM_THREADS=1 python benchmarks/engine.py --output /tmp/engine            # minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/engine.py --texts 64 --rounds 1 --layers 2  # to try it
    python benchmarks/engine.py --device cuda --shape bert-base --texts 8192 --bf16

Needs sentence-transformers. FLOPs are counted by torch's FlopCounterMode; memory is what a step adds at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_workload import SHAPES, Workload, batch_of, build_workload
from measure import Measurement, measure

from vembed.distributed.runtime import prepare_device
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.passes import RngState
from vembed.losses.infonce import InfoNCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from vembed.batch import Ragged

TEMPERATURE = 0.05
PEER_ROWS = (2, 4, 8, 16, 32, 64)
PEER_TOKENS = (256, 512, 1024)
DEFAULT_PEER = "ST cached, 32 rows"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute the step.

    Attributes:
        name: For the table.
        step: Runs it; returns padded tokens, gradients left in `.grad` of `parameters()`.
        parameters: The model's parameters, in the same order for every variant.
    """

    name: str
    step: Callable[[], int]
    parameters: Callable[[], list[Tensor]]


def main() -> int:
    """Run the comparison and print it."""
    arguments = _arguments()
    if arguments.device == "cpu" and os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit("set OMP_NUM_THREADS=1: a forked child of a process with several OpenMP threads hangs")
    prepare_device()
    results: dict[str, Any] = {}
    for lengths in ("mixed", "equal") if arguments.lengths == "both" else (arguments.lengths,):
        results[lengths] = {}
        for rows in _compare(arguments, lengths):
            results[lengths] = rows
            _write(arguments, results)  # after each round: hours must not hang on the last one
    return 0


def _write(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    if arguments.output is None:
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(arguments).items()}
    content = {"settings": settings, "torch": torch.__version__, "results": results}
    (arguments.output / "engine.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small", help="size of the encoder")
    parser.add_argument("--layers", type=int, help="fewer or more layers than the shape has")
    parser.add_argument("--texts", type=int, default=256, help="queries and documents together")
    parser.add_argument("--median", type=int, default=40, help="median length in tokens")
    parser.add_argument("--lengths", choices=("mixed", "equal", "both"), default="both")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024], help="vembed's chunk budgets")
    parser.add_argument("--peer-rows", type=int, nargs="+", default=PEER_ROWS, help="rows of the peer's mini-batches")
    parser.add_argument("--peer-tokens", type=int, nargs="*", default=PEER_TOKENS, help="tokens of them")
    parser.add_argument(
        "--check-texts",
        type=int,
        help="texts of the batch whose gradients are compared and operations counted; all by default, which must fit "
        "as one graph",
    )
    parser.add_argument("--packing", action="store_true", help="lay vembed's rows end to end, where the device can")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument(
        "--no-plain", action="store_true", help="leave the step without caching out: it takes most memory"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="variants whose names match; the plain step always")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder that gets engine.json")
    return parser.parse_args()


def _compare(arguments: argparse.Namespace, lengths: str) -> Iterator[dict[str, dict[str, float]]]:
    """Yield the table's rows after each round; print them after the last."""
    errors, flops = {}, {}
    checked = argparse.Namespace(**vars(arguments) | {"texts": arguments.check_texts or arguments.texts})
    exact = build_workload(checked, lengths, dropout=0.0)
    variants = _variants(exact, arguments)
    plain_gradients, flops["plain"] = measure(partial(_gradients, variants["plain"]), exact.device).value
    errors["plain"] = 0.0
    for name, variant in variants.items():
        if name != "plain":
            gradients, flops[name] = measure(partial(_gradients, variant), exact.device).value
            errors[name] = _worst_error(gradients, plain_gradients)
    timed = build_workload(arguments, lengths, dropout=arguments.dropout)
    variants = _variants(timed, arguments)
    if arguments.no_plain:
        del variants["plain"]
    measured: dict[str, list[Measurement]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, variant in variants.items():
            measured[name].append(measure(partial(_counted, variant), timed.device, warm_up=True))
        yield _rows(measured, flops, errors)
    _print(_rows(measured, flops, errors), timed, lengths)


def _rows(
    measured: dict[str, list[Measurement]], flops: dict[str, int], errors: dict[str, float]
) -> dict[str, dict[str, float]]:
    return {
        name: {
            "cpu_seconds": statistics.median(each.cpu_seconds for each in own),
            "wall_seconds": statistics.median(each.wall_seconds for each in own),
            "peak_bytes": statistics.median(each.peak_bytes for each in own),
            "padded_tokens": own[0].value,
            "flops": flops[name],
            "gradient_error": errors[name],
        }
        for name, own in measured.items()
    }


def _print(rows: dict[str, dict[str, float]], workload: Workload, lengths: str) -> None:
    """Print the table; speed is relative to the peer's default, its fastest setting, or the first row.

    The latter two where `--only` or `--peer-rows` has left the default, or all of the peer, out.
    """
    tokens = int(workload.lengths.sum())
    peers = sorted((name for name in rows if name.startswith("ST")), key=lambda name: rows[name]["cpu_seconds"])
    base = next((name for name in (DEFAULT_PEER, *peers, *rows) if name in rows), "")
    print(f"\n{lengths} lengths: {len(workload.lengths)} texts, {tokens} tokens, longest {workload.lengths.max()}")
    print(f"{'':26}{'CPU s':>8}{'speed':>8}{'peak MB':>9}{'padding':>9}{'TFLOP':>8}{'gradient error':>16}")
    for name, row in rows.items():
        print(
            f"{name:26}{row['cpu_seconds']:8.2f}{rows[base]['cpu_seconds'] / row['cpu_seconds']:8.2f}"
            f"{row['peak_bytes'] / 1e6:9.0f}{row['padded_tokens'] / tokens:9.2f}{row['flops'] / 1e12:8.3f}"
            f"{row['gradient_error']:16.1e}"
        )
    if not peers:
        print(f"no row of the peer: speed is relative to {base}" if rows else "no variant was measured")
        return
    best, room = peers[0], rows[peers[0]]["peak_bytes"]
    fitting = [name for name in rows if name.startswith("vembed") and rows[name]["peak_bytes"] <= room]
    print(f"fastest of the peer: {best}, {rows[best]['cpu_seconds']:.2f} s, {room / 1e6:.0f} MB")
    if fitting:
        ours = min(fitting, key=lambda name: rows[name]["cpu_seconds"])
        print(f"vembed in no more memory: {ours}, {rows[best]['cpu_seconds'] / rows[ours]['cpu_seconds']:.2f}x")


def _variants(workload: Workload, arguments: argparse.Namespace) -> dict[str, Variant]:
    """Return every way to compute the step, by its name in the table."""
    ours: list[tuple[str, ChunkBudget, float]] = []
    for tokens in arguments.tokens:
        for retain in (0.0, 0.5):
            name = f"vembed, {tokens} tokens" + (f", retain {retain}" if retain else "")
            ours.append((name, ChunkBudget(rows=2**20, tokens=tokens), retain))
    ours.append(("vembed, 32 rows", ChunkBudget(rows=32, tokens=2**20), 0.0))
    variants = [
        Variant(name, partial(our_step, workload, budget, retain), partial(_own_parameters, workload))
        for name, budget, retain in ours
    ]
    automatic = partial(our_step, workload, ChunkBudget(2**20, arguments.tokens[0]), 1.0, workload.retain_tokens)
    name = f"vembed, {arguments.tokens[0]} tokens, retain auto"
    variants.append(Variant(name, automatic, partial(_own_parameters, workload)))
    peers: list[tuple[str, dict[str, Any]]] = [
        (f"ST cached, {n} rows", {"mini_batch_size": n}) for n in arguments.peer_rows
    ]
    peers += [(f"ST cached, {n} tokens", {"mini_batch_num_tokens": n}) for n in arguments.peer_tokens]
    peer_parameters = partial(_peer_parameters, workload)
    variants += [Variant(name, partial(_peer_step, workload, options), peer_parameters) for name, options in peers]
    variants.append(Variant("GradCache padding, 32 rows", partial(_batch_padded_step, workload, 32), peer_parameters))
    variants.append(Variant("plain", partial(plain_step, workload), peer_parameters))
    return {each.name: each for each in variants if each.name == "plain" or re.search(arguments.only, each.name)}


def _own_parameters(workload: Workload) -> list[Tensor]:
    return [parameter for _, parameter in sorted(_named(workload.encoder.backbone))]


def _peer_parameters(workload: Workload) -> list[Tensor]:
    return [parameter for _, parameter in sorted(_named(workload.peer[0].auto_model))]


def _named(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    # The pooler takes no part in mean pooling; some loaders build it and some don't.
    return [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith("pooler")]


def our_step(workload: Workload, budget: ChunkBudget, retain: float, retain_tokens: int | None = None) -> int:
    """Run vembed's engine; return padded tokens."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as a run does; the peer keeps it
    pool, structure = batch_of(workload)
    options = EngineOptions(
        budget=replace(budget, bucketed=workload.device.type != "cpu"),
        device=workload.device,
        retain=retain,
        retain_tokens=retain_tokens,
        autocast_dtype=workload.autocast,
    )
    engine = GradCacheEngine(InfoNCE(temperature=TEMPERATURE).to(workload.device), options)
    return engine.step([pool], structure).padded_tokens


def _padded(column: Ragged, device: torch.device) -> dict[str, Tensor]:
    """Return a column padded to its longest row, as the peers' collators make it."""
    width = int(column.lengths.max())
    ids = torch.from_numpy(column.padded(width, 0)).long()
    mask = torch.from_numpy(np.arange(width) < column.lengths[:, None]).long()
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _peer_step(workload: Workload, options: dict[str, Any]) -> int:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    torch.backends.cuda.enable_cudnn_sdp(True)
    loss = CachedMultipleNegativesRankingLoss(workload.peer, scale=1 / TEMPERATURE, **options)
    features = [_padded(column, workload.device) for column in workload.columns]
    with _PaddedTokens(workload.peer) as counter, _autocast(workload):
        value = loss(features, None)
    value.backward()
    return counter.tokens


def _batch_padded_step(workload: Workload, rows: int) -> int:
    """Run GradCache's algorithm: every column padded to its longest row, chunks in data order."""
    with _PaddedTokens(workload.peer) as counter:
        chunks = []
        for column in workload.columns:
            padded = _padded(column, workload.device)
            for start in range(0, len(column.lengths), rows):
                chunk = {name: tensor[start : start + rows] for name, tensor in padded.items()}
                state = RngState.capture(workload.device)
                with torch.no_grad(), _autocast(workload):
                    chunks.append((chunk, state, workload.peer(dict(chunk))["sentence_embedding"].float()))
    table = torch.cat([z for _, _, z in chunks]).requires_grad_()
    _in_batch_loss(table).backward()
    assert table.grad is not None
    start = 0
    for chunk, state, z in chunks:
        with state.replayed(), _autocast(workload):
            again = workload.peer(dict(chunk))["sentence_embedding"]
        torch.autograd.backward(again.float(), table.grad[start : start + len(z)])
        start += len(z)
    return counter.tokens


def plain_step(workload: Workload) -> int:
    """Run the batch in one graph; return padded tokens."""
    with _PaddedTokens(workload.peer) as counter, _autocast(workload):
        padded = [_padded(column, workload.device) for column in workload.columns]
        table = torch.cat([workload.peer(features)["sentence_embedding"] for features in padded])
    _in_batch_loss(table.float()).backward()
    return counter.tokens


def _in_batch_loss(table: Tensor) -> Tensor:
    queries, documents = table.chunk(2)
    labels = torch.arange(len(queries), device=table.device)
    return torch.nn.functional.cross_entropy(queries @ documents.T / TEMPERATURE, labels)


def _autocast(workload: Workload) -> torch.autocast:
    return torch.autocast(workload.device.type, workload.autocast, enabled=workload.autocast is not None)


class _PaddedTokens:
    """Counts the tokens that a SentenceTransformer's first module sees."""

    def __init__(self, peer: Any) -> None:
        self.tokens = 0
        self._handle = peer[0].register_forward_pre_hook(self._count)

    def _count(self, _: Any, inputs: tuple[dict[str, Tensor], ...]) -> None:
        self.tokens += inputs[0]["input_ids"].numel()

    def __enter__(self) -> _PaddedTokens:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def _counted(variant: Variant) -> int:
    torch.manual_seed(0)
    tokens = variant.step()
    for parameter in variant.parameters():
        parameter.grad = None
    return tokens


def _gradients(variant: Variant) -> tuple[list[np.ndarray], int]:
    """Return the gradients of a step and its floating point operations."""
    for parameter in variant.parameters():
        parameter.grad = None
    with FlopCounterMode(display=False) as counter:
        variant.step()
    gradients = [_array(parameter.grad) for parameter in variant.parameters()]
    for parameter in variant.parameters():
        parameter.grad = None
    return gradients, int(counter.get_total_flops())


def _array(gradient: Tensor | None) -> np.ndarray:
    assert gradient is not None, "a parameter of the encoder got no gradient"
    return gradient.cpu().double().numpy()


def _worst_error(gradients: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Return the largest relative difference of a parameter's gradient; those that are zero in truth are left out."""
    norms = [float(np.linalg.norm(own)) for own in reference]
    pairs = zip(gradients, reference, norms, strict=True)
    return max(float(np.linalg.norm(own - other)) / norm for own, other, norm in pairs if norm > 1e-6 * max(norms))


if __name__ == "__main__":
    sys.exit(main())
