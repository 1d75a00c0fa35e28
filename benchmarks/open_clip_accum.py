"""Compare one step of a CLIP: vembed's engine, and open_clip's own training function with `--accum-freq`.

Both get the same weights, the same pictures and captions and the same global batch. The peer is open_clip's own
`train_one_epoch`, run as it is with an optimizer that changes nothing. Its pieces are `--rows` pictures and their
captions in one graph; a chunk of vembed is `--rows` pictures, or `--rows` captions. Captions are tokenized before the
clock starts, as a data loader's worker does it for both. open_clip's are padded to the context length, as its tokenizer
makes them; one variant of vembed sees them so too and shows what comes from cutting them.

The gradients of each are compared with those of the whole batch in one graph, in full precision, by open_clip's own
loss; the learned logit scale apart from the encoder, since under accumulation open_clip adds the logit scale's gradient
once for each piece.

    OMP_NUM_THREADS=1 python benchmarks/open_clip_accum.py --output /tmp/accum
    python benchmarks/open_clip_accum.py --device cuda --shape vit-b-32 --batch 4096 --rows 256 --bf16

Captions have lognormal lengths, median 11 tokens. Variants are interleaved; medians. Operations are counted in the same
call that yields the gradients, which isn't timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import open_clip
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_workload import structure_of_pairs
from measure import Measurement, measure

from vembed.batch import Features, Ragged
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, Pool
from vembed.losses.infonce import InfoNCE
from vembed.models.open_clip import OpenClipEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "embed_dim": 128,
        "vision_cfg": {"image_size": 64, "layers": 4, "width": 192, "head_width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 192, "heads": 3, "layers": 4},
    },
    "vit-b-32": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
    },
}
PEER = "open_clip accumulation"


@dataclass(frozen=True, slots=True)
class Workload:
    """One model and one batch.

    Attributes:
        device: Where the step runs.
        model: The open_clip model that the peer trains.
        encoder: vembed's encoder around a copy of it.
        pixels: Pictures (B, 3, S, S), float32.
        ids: Captions as open_clip tokenizes them, (B, 77).
        cut: The same for vembed's encoder.
        padded: The same, every caption as long as open_clip's.
        autocast: Type of mixed precision, or None.
    """

    device: torch.device
    model: Any
    encoder: OpenClipEncoder
    pixels: Tensor
    ids: Tensor
    cut: Features
    padded: Features
    autocast: torch.dtype | None


def main() -> int:
    """Run the comparison and print it."""
    arguments = _arguments()
    if arguments.device == "cpu" and os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit("set OMP_NUM_THREADS=1: a forked child of a process with several OpenMP threads hangs")
    logging.disable(logging.INFO)  # open_clip logs each step
    workload = _workload(arguments)
    variants: dict[str, Callable[[], float]] = {
        PEER: partial(_peer_step, workload, arguments.rows),
        "vembed, padded texts": partial(_our_step, workload, workload.padded, arguments.rows),
        "vembed": partial(_our_step, workload, workload.cut, arguments.rows),
        "vembed, retain 0.5": partial(_our_step, workload, workload.cut, arguments.rows, retain=0.5),
    }
    reference = measure(partial(_whole_batch, workload), workload.device).value
    rows: dict[str, dict[str, float]] = {}
    for name, step in variants.items():
        gradients, flops = measure(partial(_gradients, workload, step, ours=name != PEER), workload.device).value
        rows[name] = {**_errors(gradients, reference), "flops": flops}
    measured: dict[str, list[Measurement]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, step in variants.items():
            measured[name].append(measure(step, workload.device))
    for name, own in measured.items():
        rows[name]["cpu_seconds"] = statistics.median(each.cpu_seconds for each in own)
        rows[name]["peak_bytes"] = statistics.median(each.peak_bytes for each in own)
        speeds = [peer.cpu_seconds / each.cpu_seconds for peer, each in zip(measured[PEER], own, strict=True)]
        rows[name]["least_speed"], rows[name]["most_speed"] = min(speeds), max(speeds)
    _print(rows, workload, arguments)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        settings = {key: str(value) for key, value in vars(arguments).items()}
        versions = {"torch": torch.__version__, "open_clip": open_clip.__version__}
        content = {"settings": settings, "versions": versions, "results": rows}
        (arguments.output / "open_clip_accum.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--batch", type=int, default=256, help="global batch, in pairs")
    parser.add_argument("--rows", type=int, default=32, help="pairs of a piece, rows of a chunk; divides the batch")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder that gets open_clip_accum.json")
    arguments = parser.parse_args()
    if min(arguments.batch, arguments.rows, arguments.rounds) < 1:
        parser.error("--batch, --rows and --rounds are at least 1")
    if arguments.batch % arguments.rows:
        parser.error(f"--rows {arguments.rows} doesn't divide --batch {arguments.batch}")
    return arguments


def _print(rows: dict[str, dict[str, float]], workload: Workload, arguments: argparse.Namespace) -> None:
    base = rows[PEER]["cpu_seconds"]
    seconds = "seconds" if workload.device.type == "cuda" else "CPU s"
    print(
        f"{arguments.shape}: {arguments.batch} pairs in pieces of {arguments.rows}, {workload.encoder.picture_tokens} "
        f"tokens in a picture, {np.median(workload.cut.lengths):g} in the median caption"
    )
    titles = (
        f"{seconds:>8}{'speed':>8}{'of rounds':>12}{'peak MB':>9}{'TFLOP':>8}{'encoder error':>15}{'scale ratio':>13}"
    )
    print(f"{'':24}{titles}")
    for name, row in rows.items():
        print(
            f"{name:24}{row['cpu_seconds']:8.2f}{base / row['cpu_seconds']:8.2f}"
            f"{row['least_speed']:7.2f}-{row['most_speed']:.2f}{row['peak_bytes'] / 1e6:9.0f}"
            f"{row['flops'] / 1e12:8.3f}{row['encoder_error']:15.1e}{row['scale_ratio']:13.4f}"
        )
    print(
        "speed: of the medians, and the least and most of a round; encoder error: largest relative difference of a "
        "parameter's gradient; scale ratio: the logit scale's / truth"
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    config = SHAPES[arguments.shape]
    device = torch.device(arguments.device)
    model = open_clip.CLIP(**config, output_dict=True).to(device).train()
    side = config["vision_cfg"]["image_size"]
    tokenizer = open_clip.SimpleTokenizer()
    words = ["cat", "dog", "tree", "house", "river", "boat", "cloud", "stone", "apple", "train", "green", "small"]
    lengths = np.clip(rng.lognormal(np.log(10), 0.4, arguments.batch), 3, 70).astype(int)
    captions = [" ".join(rng.choice(words, length)) for length in lengths]
    own = copy.deepcopy(model)
    encoder = OpenClipEncoder(
        "benchmark",
        model=own,
        tokenizer=tokenizer,
        preprocess=_blank_preprocess(side),
        config={**config},
        weights="random",
    )
    encoder.to(device).train()
    ids = tokenizer(captions)
    padded = Ragged.from_rows(list(ids.numpy()))
    return Workload(
        device=device,
        model=model,
        encoder=encoder,
        pixels=torch.from_numpy(rng.standard_normal((arguments.batch, 3, side, side), dtype=np.float32)),
        ids=ids,
        cut=encoder.featurize(captions, "query"),
        padded=Features({"input_ids": padded}, padded.lengths),
        autocast=torch.bfloat16 if arguments.bf16 else None,
    )


def _blank_preprocess(side: int) -> Callable[[Any], Tensor]:
    return lambda _: torch.zeros(3, side, side)


class _NoOptimizer:
    """Leaves weights and gradients as they are, so that the gradients of the step can be read."""

    param_groups: tuple[dict[str, float], ...] = ({"lr": 0.0},)

    def zero_grad(self) -> None:
        """Keep them: they are None when a step begins."""

    def step(self) -> None:
        """Change nothing."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The batch as a data loader of open_clip hands it out."""

    pieces: list[tuple[Tensor, Tensor]]

    @property
    def num_batches(self) -> int:
        return len(self.pieces)

    @property
    def num_samples(self) -> int:
        return sum(len(texts) for _, texts in self.pieces)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.pieces)


def _peer_step(workload: Workload, rows: int) -> float:
    """Run open_clip's training function over one global batch."""
    from open_clip_train.train import train_one_epoch  # type: ignore[import-untyped]  # it has no py.typed

    pieces = _Pieces(list(zip(workload.pixels.split(rows), workload.ids.split(rows), strict=True)))
    settings = SimpleNamespace(
        device=str(workload.device),
        precision="amp_bf16" if workload.autocast else "fp32",
        distill=False,
        accum_freq=len(pieces.pieces),
        skip_scheduler=True,
        horovod=False,
        grad_clip_norm=None,
        rank=0,
        local_rank=0,
        log_local=False,
        log_every_n_steps=10**9,
        batch_size=rows,
        world_size=1,
        wandb=False,
    )
    data = {"train": SimpleNamespace(set_epoch=lambda _: None, dataloader=pieces)}
    optimizer: Any = _NoOptimizer()
    train_one_epoch(workload.model, data, open_clip.ClipLoss(), 0, optimizer, None, None, None, settings)
    return 0.0


def _our_step(workload: Workload, captions: Features, rows: int, *, retain: float = 0.0) -> float:
    """Run vembed's engine over the same batch; return the gradient of the logit scale."""
    encoder = workload.encoder
    num_pairs = len(captions)
    pictures = Features(
        {},
        np.full(num_pairs, encoder.picture_tokens, dtype=np.int64),
        {"pixel_values": workload.pixels.numpy()},
    )
    pools = [
        Pool(encoder, encoder.collate, captions, np.arange(num_pairs)),
        Pool(encoder, encoder.collate, pictures, np.arange(num_pairs, 2 * num_pairs)),
    ]
    loss = _loss_of(workload)
    budget = ChunkBudget(rows, 2**30, bucketed=workload.device.type != "cpu")
    options = EngineOptions(budget, workload.device, retain=retain, autocast_dtype=workload.autocast)
    engine = GradCacheEngine(loss, options)
    engine.step(pools, structure_of_pairs(num_pairs))
    gradient = loss.get_parameter("log_scale").grad
    assert gradient is not None
    return gradient.item()


def _loss_of(workload: Workload) -> InfoNCE:
    temperature = 1 / workload.model.logit_scale.exp().item()
    return InfoNCE(temperature=temperature, learn_temperature=True, bidirectional=True).to(workload.device)


def _whole_batch(workload: Workload) -> dict[str, np.ndarray]:
    """Return the gradients of the whole batch in one graph, by open_clip's own loss, in full precision.

    Layers are recomputed in backward: the graph of a batch that needs pieces wouldn't fit otherwise.
    """
    _clear(workload.model)
    workload.model.set_grad_checkpointing(True)
    output = workload.model(workload.pixels.to(workload.device), workload.ids.to(workload.device))
    open_clip.ClipLoss()(**output).backward()
    workload.model.set_grad_checkpointing(False)
    return _arrays(workload.model)


def _gradients(workload: Workload, step: Callable[[], float], *, ours: bool) -> tuple[dict[str, np.ndarray], int]:
    """Return the gradients that a step leaves, and the floating point operations that it took."""
    model = workload.encoder.model if ours else workload.model
    _clear(model)
    with FlopCounterMode(display=False) as counter:
        scale_gradient = step()
    found = _arrays(model)
    if ours:  # the logit scale is the loss's own
        found["logit_scale"] = np.array(scale_gradient)
    return found, int(counter.get_total_flops())


def _clear(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {
        name: parameter.grad.cpu().double().numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _errors(gradients: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    norms = {name: float(np.linalg.norm(own)) for name, own in reference.items()}
    floor = 1e-6 * max(norms.values())
    worst = max(
        float(np.linalg.norm(gradients[name] - own)) / norms[name]
        for name, own in reference.items()
        if name != "logit_scale" and norms[name] > floor
    )
    return {
        "encoder_error": worst,
        "scale_ratio": float(gradients["logit_scale"]) / float(reference["logit_scale"]),
    }


if __name__ == "__main__":
    sys.exit(main())
