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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.config.keys.adapters import AdapterKeys
from vembed.config.keys.model import ModelKeys
from vembed.config.keys.optimisation import OptimisationKeys
from vembed.config.load import load_config
from vembed.distributed.fsdp import shard_encoder
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, Pool
from vembed.gradcache.row_assignment import RowAssignment
from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE
from vembed.models.adapters.lora import add_adapters
from vembed.models.adapters.trainable import freeze
from vembed.models.probe import one_picture
from vembed.models.profile.measure import ProfileTarget
from vembed.models.profile.profile import profile_model
from vembed.models.registry import load_skeleton
from vembed.models.tiny_clip import GRAMS_PER_TOKEN, TinyClip
from vembed.plan.devices import Devices
from vembed.plan.hardware import Machine, cpu_memory_bytes
from vembed.plan.plan import make_plan
from vembed.plan.problem import DataSize, Way
from vembed.training.optimizer import Schedule, Updater

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.distributed.fsdp import ShardingMode
    from vembed.models.encoder import Encoder

TILE_SIZE = 1024
MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One model and one way to train it.

    Attributes:
        name: For people.
        model: A model's name, or the shape of one: config.json of transformers, model_cfg of open_clip.
        pairs: Queries of the batch; each has one document.
        tokens: Tokens of each text.
        pictures: Whether the documents are pictures.
        chunk_tokens: Most padded tokens of a chunk.
        retain: Share of the batch whose graphs are kept.
        gradient_checkpointing: Whether layers are recomputed.
        bf16: Whether the encoder computes in bfloat16.
        lora: Whether adapters train beside a frozen base.
        trainable: What trains otherwise.
        ranks: Processes that share the batch, texts only.
        fsdp_mode: What stays whole during a step; None replicates.
    """

    name: str
    model: str | dict[str, Any]
    pairs: int = 24
    tokens: int = 64
    pictures: bool = False
    chunk_tokens: int = 1024
    retain: float = 0.0
    gradient_checkpointing: bool = False
    bf16: bool = False
    lora: bool = False
    trainable: str = "all"
    ranks: int = 1
    fsdp_mode: ShardingMode | None = None

    @property
    def assignment(self) -> RowAssignment:
        """The rows of each rank: its share of the queries, and their documents."""
        shares = np.array_split(np.arange(self.pairs), self.ranks)
        return RowAssignment(tuple(np.concatenate([share, self.pairs + share]) for share in shares))


def build(case: Case, folder: Path, device: str) -> Encoder:
    """Return the case's encoder, on the meta device or with random weights."""
    encoder = load_skeleton(keys_of(case, folder), device=device)
    if case.lora:
        add_adapters(encoder, AdapterKeys())
    else:
        freeze(encoder, case.trainable)
    if case.gradient_checkpointing:
        encoder.enable_gradient_checkpointing()
    return encoder.train()


def keys_of(case: Case, folder: Path) -> ModelKeys:
    """Return what names the model; a shape becomes a file."""
    if isinstance(case.model, str):
        return ModelKeys(model_name=case.model)
    path = folder / "shape.json"
    path.write_text(json.dumps(case.model), "utf-8")
    return ModelKeys(model_name=str(path))


def measure_step(case: Case, device: torch.device) -> dict[str, int]:
    """Run two steps and return the bytes of the second: what stays from step to step, and the peak."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        encoder = build(case, Path(folder), str(device))
    ranks = Ranks.of_this_process()
    compute_dtype = torch.bfloat16 if case.bf16 else None
    sharded = None
    if case.fsdp_mode is not None:
        way = Way("fsdp", mode=case.fsdp_mode, sharding_factor=ranks.world_size)
        sharded = shard_encoder(encoder, way, ranks, device=device, compute_dtype=compute_dtype)
    loss = InfoNCE(temperature=0.05, tile_size=TILE_SIZE).to(device)
    schedule = Schedule(1e-5, "constant", warmup_steps=0, steps=2)
    updater = Updater(encoder, loss, OptimisationKeys(), schedule, loss_scaling=False)
    options = EngineOptions(
        budget=ChunkBudget(MOST_ROWS, case.chunk_tokens),
        device=device,
        retain=case.retain,
        autocast_dtype=compute_dtype,
        ranks=ranks,
    )
    trained = [each for each in encoder.parameters() if each.requires_grad]
    engine = GradCacheEngine(loss, options, trained, sharded=sharded)
    pools, structure = make_batch(case, encoder, ranks.rank)

    def step(number: int) -> None:
        engine.step(pools, structure, assignment=None if ranks.is_one else case.assignment)
        updater.gradient_norm()
        updater.update(number)

    step(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        stays = torch.cuda.memory_allocated(device)
        step(1)
        torch.cuda.synchronize(device)
        return {"stays": stays, "peak": torch.cuda.max_memory_allocated(device)}
    stays = _bytes_that_stay(encoder, updater)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(1)
    assert profile.profiler is not None
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return {"stays": stays, "peak": stays + int(np.cumsum(changes).max())}


def _bytes_that_stay(encoder: Encoder, updater: Updater) -> int:
    tensors = [*encoder.parameters(), *encoder.buffers()]
    tensors += [value for state in updater.optimizer.state.values() for value in state.values()]
    storages = [_local(each).untyped_storage() for each in tensors]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_batch(case: Case, encoder: Encoder, rank: int) -> tuple[list[Pool], BatchStructure]:
    """Return a rank's part of a batch of random rows: one query and one document for each pair."""
    first, second = np.arange(case.pairs), case.pairs + np.arange(case.pairs)
    if case.pictures:
        pools = [  # in the order of a run
            Pool(encoder, encoder.collate, _pictures(case.pairs, encoder), second),
            Pool(encoder, encoder.collate, _texts(case, case.pairs, encoder), first),
        ]
    else:
        own = case.assignment.slots[rank]
        pools = [Pool(encoder, encoder.collate, _texts(case, len(own), encoder), own)]
    batch = ContrastiveBatch(
        queries=("",) * case.pairs,
        documents=("",) * case.pairs,
        positives_P2=np.stack([first, first], axis=1).astype(np.int64),
        query_ids_Q=first.astype(np.int64),
        document_ids_D=second.astype(np.int64),
        record_ids=tuple(range(case.pairs)),
    )
    return pools, BatchStructure.of(batch)


def _texts(case: Case, count: int, encoder: Encoder) -> Features:
    """Return rows of nearly one length: all chunks are as full as may be, and padded."""
    rng = np.random.default_rng(0)
    lengths = np.full(count, case.tokens)
    lengths[1::2] -= 1
    ids = Ragged.from_rows([rng.integers(5, 500, length) for length in lengths])
    if not isinstance(encoder, TinyClip):
        return Features({"input_ids": ids}, ids.lengths)
    grams = Ragged.from_rows([rng.integers(5, 500, GRAMS_PER_TOKEN * length) for length in lengths])
    return Features({"grams": grams}, ids.lengths)


def _pictures(count: int, encoder: Encoder) -> Features:
    one = one_picture(encoder)
    per_row = {name: np.repeat(values, count, axis=0) for name, values in one.per_row.items()}
    return Features({}, np.repeat(one.lengths, count), per_row)


def predict(case: Case, device: str) -> dict[str, int]:
    """Return what the plan of such a run says, by part, from the model's description alone."""
    overrides = [
        "model_name=m",
        f"global_batch_size={case.pairs}",
        f"max_seq_length={case.tokens}",
        f"gradient_cache_chunk_tokens={case.chunk_tokens}",
        f"gradient_cache_chunk_size={MOST_ROWS}",
        "use_gradient_cache=true",
        f"retain={case.retain}",
        f"gradient_checkpointing={str(case.gradient_checkpointing).lower()}",
        f"bf16={str(case.bf16).lower()}",
        f"use_lora={str(case.lora).lower()}",
        f"trainable={case.trainable}",
        f"loss_tile_size={TILE_SIZE}",
        f"use_fsdp={str(case.fsdp_mode is not None).lower()}",
        f"fsdp_mode={case.fsdp_mode or 'auto'}",
    ]
    config = load_config(None, overrides).config
    machine = Machine(device, "benchmark", cpu_memory_bytes(), 1, fast_bf16=False)
    with tempfile.TemporaryDirectory() as folder:
        keys = keys_of(case, Path(folder))
        target = ProfileTarget(device, torch.bfloat16 if case.bf16 else None)
        lora = AdapterKeys() if case.lora else None
        model = profile_model(keys, target, trainable=case.trainable, lora=lora)
    data = DataSize(case.pairs, 1.0, pictures_per_record=float(case.pictures))
    devices = Devices.of(machine, case.ranks)
    sizes = make_plan(config, machine, model.limited(case.tokens), data, devices=devices).bytes_per_device
    return {**asdict(sizes), "total": sizes.total}


def compare(case: Case, device: str) -> dict[str, Any]:
    """Predict a case here, and measure it in processes of its own."""
    predicted = predict(case, device)
    command = [sys.executable, str(Path(__file__)), "--device", device, "--measure", json.dumps(asdict(case))]
    with tempfile.TemporaryDirectory() as folder:
        words = [[*command, "--rank", str(rank), "--meet", str(Path(folder) / "meet")] for rank in range(case.ranks)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running = [subprocess.Popen(each, **pipes) for each in words]  # type: ignore[call-overload]
        said = [each.communicate() for each in running]
    if any(each.returncode for each in running):
        raise RuntimeError(f"case {case.name} failed:\n" + "\n".join(errors for _, errors in said))
    measured = max((json.loads(out.strip().splitlines()[-1]) for out, _ in said), key=lambda each: each["peak"])
    return {
        "case": case.name,
        "predicted": predicted,
        "measured": measured,
        "ratio": predicted["total"] / measured["peak"],
    }


def bert(hidden: int = 384, layers: int = 6, tokens: int = 64) -> dict[str, Any]:
    """Return the shape of a BERT that takes texts of so many tokens."""
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": tokens,
    }


def clip(text: int = 256, vision: int = 384, layers: int = 6, tokens: int = 48) -> dict[str, Any]:
    """Return the shape of a CLIP whose pictures are 49 patches."""
    stack = {"num_hidden_layers": layers}
    return {
        "model_type": "clip",
        "projection_dim": text,
        "text_config": {
            **stack,
            "hidden_size": text,
            "num_attention_heads": text // 64,
            "intermediate_size": 4 * text,
            "vocab_size": 20000,
            "max_position_embeddings": tokens,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        "vision_config": {
            **stack,
            "hidden_size": vision,
            "num_attention_heads": vision // 64,
            "intermediate_size": 4 * vision,
            "image_size": 224,
            "patch_size": 32,
        },
    }


def qwen(hidden: int = 512, layers: int = 8, tokens: int = 64) -> dict[str, Any]:
    """Return the shape of a decoder with shared key heads."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "intermediate_size": 3 * hidden,
        "vocab_size": 30000,
        "max_position_embeddings": tokens,
    }


CASES = (
    Case("BERT, nothing kept", bert()),
    Case("BERT, half kept", bert(), retain=0.5),
    Case("BERT, all kept", bert(), retain=1.0),
    Case("BERT, plain training", bert(), chunk_tokens=8192),
    Case("BERT, gradient checkpointing", bert(), chunk_tokens=2048, gradient_checkpointing=True),
    Case("BERT, bfloat16, half kept", bert(), retain=0.5, bf16=True),
    Case("BERT, LoRA", bert(), chunk_tokens=2048, lora=True),
    Case("BERT, last 2 layers", bert(), retain=1.0, trainable="last_2_layers"),
    Case("Qwen3, nothing kept", qwen()),
    Case("Qwen3, gradient checkpointing", qwen(), chunk_tokens=2048, gradient_checkpointing=True),
    Case("BERT, 2 ranks, replicated", bert(), ranks=2, retain=0.5),
    Case("BERT, 2 ranks, fsdp fast", bert(), ranks=2, fsdp_mode="fast"),
    Case("BERT, 2 ranks, fsdp lean", bert(), ranks=2, fsdp_mode="lean"),
    Case("BERT, 2 ranks, fsdp sharded", bert(), ranks=2, fsdp_mode="sharded"),
    Case("BERT, 2 ranks, fsdp fast, bf16", bert(), ranks=2, fsdp_mode="fast", bf16=True, retain=0.5),
    Case(
        "BERT, bfloat16, checkpointing",
        bert(512, 24),
        pairs=16,
        chunk_tokens=512,
        bf16=True,
        gradient_checkpointing=True,
    ),
    Case("CLIP, nothing kept", clip(), tokens=48, pictures=True),
    Case("CLIP, half kept", clip(), tokens=48, pictures=True, retain=0.5),
    Case("CLIP, all kept", clip(), tokens=48, pictures=True, retain=1.0),
    Case("CLIP, the image tower", clip(), tokens=48, pictures=True, trainable="vision"),
    Case("open_clip ViT-B-32", "open_clip:ViT-B-32", pairs=16, tokens=77, pictures=True, chunk_tokens=512),
    Case("tiny-transformer, half kept", "builtin:tiny-transformer", tokens=128, retain=0.5),
    Case("tiny-clip", "builtin:tiny-clip", pairs=512, tokens=64, pictures=True, chunk_tokens=8192),
)


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
        case = Case(**json.loads(arguments.measure))
        if case.ranks > 1:
            dist.init_process_group(init_method=f"file://{arguments.meet}", rank=arguments.rank, world_size=case.ranks)
        print(json.dumps(measure_step(case, torch.device(arguments.device))))
        if case.ranks > 1:
            dist.destroy_process_group()
        return 0
    wanted = [case for case in CASES if not arguments.cases or case.name.startswith(tuple(arguments.cases))]
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
