"""Compare the predicted memory of a training step with what a step really allocates.

Each case builds a model with random weights, predicts the peak of a step from the model's config alone, then runs two
steps of the engine with AdamW in a process of its own and takes the peak of the second, in which the optimizer has its
state. On a CPU the truth is every allocation that torch's profiler sees, on a GPU `max_memory_allocated`. Memory that
isn't torch's (the interpreter, libraries, the batch as numpy arrays) is in neither number. Of several ranks, each a
process on this machine, the one with the highest peak counts. The path for GPUs hasn't run on one yet.

    python benchmarks/memory_prediction.py [CASE ...] [--device cuda] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from memory_cases import CASES, GPU_CASES, Case
from memory_step import MOST_ROWS, TILE_SIZE, prepare_step

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.config.load import load_config
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import prepare_device
from vembed.gradcache.engine import Pool
from vembed.losses.base import BatchStructure
from vembed.models.adapters import add_adapters, freeze, narrow_frozen
from vembed.models.colbert import SEEN, ColbertEncoder
from vembed.models.composed import ComposedTowers
from vembed.models.from_scratch import GRAMS_PER_TOKEN, TinyClip
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_skeleton
from vembed.models.measure import ProfileTarget
from vembed.models.plannable import ROWS, one_picture
from vembed.models.profile import profile_model
from vembed.models.tables import NgramBag
from vembed.models.vision_language import VisionLanguageEncoder
from vembed.models.vision_late import VisionLateEncoder
from vembed.plan.devices import Devices, Machine, cpu_memory_bytes
from vembed.plan.plan import make_plan
from vembed.plan.problem import DataSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.models.encoder import Encoder
    from vembed.plan.memory import ModelSize
    from vembed.training.optimizer import Optimizer


def build(case: Case, folder: Path, device: str) -> Encoder:
    """Return the case's encoder, on the meta device or with random weights."""
    encoder = load_skeleton(keys_of(case, folder), device=device)
    if case.lora:
        add_adapters(encoder, AdapterKeys())
    else:
        freeze(encoder, case.trainable)
    narrow_frozen(encoder, torch.bfloat16 if case.bf16 else None)
    if case.gradient_checkpointing:
        encoder.enable_gradient_checkpointing()
    return encoder.train()


def keys_of(case: Case, folder: Path) -> ModelKeys:
    """Return what names the model; a shape becomes a file."""
    pooling: Literal["none", "auto"] = "none" if case.several else "auto"
    if isinstance(case.model, str):
        return ModelKeys(model_name=case.model, pooling_method=pooling)
    if isinstance(case.model, tuple | list):
        towers = dict(zip(("text_model_name", "image_model_name"), case.model, strict=True))
        for key, shape in towers.items():
            (folder / f"{key}.json").write_text(json.dumps(shape), "utf-8")
        return ModelKeys.model_validate({key: str(folder / f"{key}.json") for key in towers} | {"projection_dim": 256})
    path = folder / "shape.json"
    path.write_text(json.dumps(case.model), "utf-8")
    return ModelKeys(model_name=str(path), pooling_method=pooling)


def prepare(case: Case, device: torch.device) -> tuple[Encoder, Optimizer, Callable[[int], tuple[float, float]]]:
    """Return a case's encoder with random weights, its optimizer, and the step, which gives loss and gradient norm."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        encoder = build(case, Path(folder), str(device))
    ranks = Ranks.of_this_process()
    optimizer, step = prepare_step(case, encoder, ranks, device, *make_batch(case, encoder, ranks.rank))
    return encoder, optimizer, step


def measure_step(case: Case, device: torch.device) -> dict[str, int]:
    """Run two steps and return the bytes of the second: what stays from step to step, and the peak.

    On a GPU also what the caching allocator took at its peak, and what the driver has given to all processes by then.
    """
    encoder, optimizer, step = prepare(case, device)
    step(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        stays = torch.cuda.memory_allocated(device)
        step(1)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"stays": stays, "peak": peak, "reserved": reserved, "driver": total - free}
    stays = _bytes_that_stay(encoder, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(1)
    assert profile.profiler is not None
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return {"stays": stays, "peak": stays + int(np.cumsum(changes).max())}


def _bytes_that_stay(encoder: Encoder, optimizer: Optimizer) -> int:
    tensors = [*encoder.parameters(), *encoder.buffers()]
    tensors += [value for state in optimizer.adamw.state.values() for value in state.values()]
    storages = [_local(each).untyped_storage() for each in tensors]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_batch(case: Case, encoder: Encoder, rank: int) -> tuple[list[Pool], BatchStructure]:
    """Return a rank's part of a batch of random rows: one query and one document for each pair."""
    first, second = np.arange(case.pairs), case.pairs + np.arange(case.pairs)
    if case.pictures and "text" not in encoder.modalities:
        pools = [_pool(encoder, _pictures(2 * case.pairs, encoder), np.concatenate([first, second]))]
    elif case.pictures:
        pools = [  # in the order of a run
            _pool(encoder, _pictures(case.pairs, encoder), second),
            _pool(encoder, _texts(case, case.pairs, encoder), first),
        ]
    else:
        own = case.assignment.slots[rank]
        pools = [_pool(encoder, _texts(case, 2 * case.pairs, encoder).take(own), own)]
    batch = ContrastiveBatch(
        queries=("",) * case.pairs,
        documents=("",) * case.pairs,
        positives_P2=np.stack([first, first], axis=1).astype(np.int64),
        query_ids_Q=first.astype(np.int64),
        document_ids_D=second.astype(np.int64),
        record_ids=tuple(range(case.pairs)),
    )
    return pools, BatchStructure.of(batch)


def _pool(encoder: Encoder, features: Features, slots: NDArray[np.int64]) -> Pool:
    return Pool(encoder, encoder.collate, features, slots, encoder.num_vectors(features))


def _texts(case: Case, count: int, encoder: Encoder) -> Features:
    """Return rows of nearly one length: all chunks are as full as may be, and padded."""
    rng = np.random.default_rng(0)
    lengths = np.full(count, case.tokens)
    lengths[1::2] -= 1
    ids = Ragged.from_rows([rng.integers(5, 500, length) for length in lengths])
    if isinstance(encoder, ComposedTowers):
        return Features({"text.input_ids": ids}, ids.lengths, {"text.lengths": ids.lengths})
    if isinstance(encoder, ColbertEncoder | VisionLateEncoder):
        counted = Ragged.from_rows([np.arange(length) for length in lengths])
        seen = {SEEN: lengths} if isinstance(encoder, ColbertEncoder) else {}
        return encoder.head.with_vectors(Features({"input_ids": ids}, ids.lengths, seen), counted, "document")
    if not isinstance(encoder, TinyClip):
        return Features({"grams" if isinstance(encoder, NgramBag) else "input_ids": ids}, ids.lengths)
    grams = Ragged.from_rows([rng.integers(5, 500, GRAMS_PER_TOKEN * length) for length in lengths])
    return Features({"grams": grams}, ids.lengths)


def _pictures(count: int, encoder: Encoder) -> Features:
    if isinstance(encoder, VisionLanguageEncoder):
        return encoder.blank_pictures().take(np.arange(count) % ROWS)
    return one_picture(encoder).take(np.zeros(count, dtype=np.int64))


def predict(case: Case, device: str) -> dict[str, int]:
    """Return what the plan of such a run says, by part, from the model's description alone."""
    overrides = [
        "model_name=m",
        f"global_batch_size={case.pairs}",
        f"max_seq_length={case.tokens}",
        f"gradient_cache_chunk_tokens={case.chunk_tokens}",
        f"gradient_cache_chunk_size={MOST_ROWS}",
        "use_gradient_cache=true",
        f"retain={'auto' if case.retain is None else case.retain}",
        f"gradient_checkpointing={str(case.gradient_checkpointing).lower()}",
        f"bf16={str(case.bf16).lower()}",
        f"use_lora={str(case.lora).lower()}",
        f"trainable={case.trainable}",
        f"loss_tile_size={TILE_SIZE}",
        f"loss_type={'colbert' if case.several else 'infonce'}",
        f"use_fsdp={str(case.fsdp_mode is not None).lower()}",
        f"fsdp_mode={case.fsdp_mode or 'auto'}",
        "packing=false",
        "compile=false",
    ]
    config = load_config(None, overrides).config
    machine = Machine(device, "benchmark", cpu_memory_bytes(), 1, fast_bf16=False)
    with tempfile.TemporaryDirectory() as folder:
        keys = keys_of(case, Path(folder))
        target = ProfileTarget(device, torch.bfloat16 if case.bf16 else None)
        lora = AdapterKeys() if case.lora else None
        model = profile_model(keys, target, trainable=case.trainable, lora=lora).limited(case.tokens)
        model = _of_these_pictures(model, load_skeleton(keys))
    pictures = 2.0 if case.pictures and len(model.towers) == 1 else float(case.pictures)
    data = DataSize(case.pairs, 1.0, pictures_per_record=pictures, record_tokens=(2.0 * case.tokens,))
    devices = Devices.of(machine, case.ranks)
    sizes = make_plan(config, machine, model, data, devices=devices).bytes_per_device
    return {**asdict(sizes), "total": sizes.total}


def _of_these_pictures(model: ModelSize, encoder: Encoder) -> ModelSize:
    """Return a model's size for pictures of the batch's size: a vision-language model would take larger ones."""
    if not isinstance(encoder, VisionLanguageEncoder):
        return model
    width = int(encoder.blank_pictures().lengths[0])
    towers = [each if each.cuts else replace(each, max_tokens=width) for each in model.towers]
    adapted = None if model.adapted is None else _of_these_pictures(model.adapted, encoder)
    return replace(model, towers=tuple(towers), adapted=adapted)


def compare(case: Case, device: str) -> dict[str, Any]:
    """Predict a case here, and measure it in processes of its own."""
    predicted = predict(case, device)
    others = _taken_bytes(device)
    command = [sys.executable, str(Path(__file__)), "--device", device, "--measure", json.dumps(asdict(case))]
    with tempfile.TemporaryDirectory() as folder:
        words = [[*command, "--rank", str(rank), "--meet", str(Path(folder) / "meet")] for rank in range(case.ranks)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running = [subprocess.Popen(each, **pipes) for each in words]  # type: ignore[call-overload]
        said = [each.communicate() for each in running]
    if any(each.returncode for each in running):
        raise RuntimeError(f"case {case.name} failed:\n" + "\n".join(errors for _, errors in said))
    measured = max((json.loads(out.strip().splitlines()[-1]) for out, _ in said), key=lambda each: each["peak"])
    if "driver" in measured:
        measured["driver"] -= others
        measured["others_changed"] = _taken_bytes(device) - others  # by programs beside this one
    return {
        "case": case.name,
        "predicted": predicted,
        "measured": measured,
        "ratio": predicted["total"] / measured["peak"],
    }


def _taken_bytes(device: str) -> int:
    """Return the memory of the GPU that is taken, this process's part included; 0 on a CPU."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases, or beginnings of them; all by default")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        prepare_device()
        case = Case(**json.loads(arguments.measure))
        if case.ranks > 1:
            dist.init_process_group(init_method=f"file://{arguments.meet}", rank=arguments.rank, world_size=case.ranks)
        print(json.dumps(measure_step(case, torch.device(arguments.device))))
        if case.ranks > 1:
            dist.destroy_process_group()
        return 0
    asked = tuple(arguments.cases) or ("GPU",) * (arguments.device == "cuda")
    wanted = [case for case in (*CASES, *GPU_CASES) if (case.name.startswith(asked) if asked else case in CASES)]
    print(
        f"{'MB':32}{'weights':>9}{'gradients':>10}{'AdamW':>8}{'activations':>12}{'total':>8}{'measured':>10}{'ratio':>7}"
    )
    results = []
    for case in wanted:
        results.append(compare(case, arguments.device))
        parts, measured = results[-1]["predicted"], results[-1]["measured"]
        numbers = [parts[each] / 1e6 for each in ("parameters", "gradients", "optimizer", "activations", "total")]
        shown = "".join(f"{each:{width}.0f}" for each, width in zip(numbers, (9, 10, 8, 12, 8), strict=True))
        print(f"{case.name:32}{shown}{measured['peak'] / 1e6:10.0f}{results[-1]['ratio']:7.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
