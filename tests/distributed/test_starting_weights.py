"""One process reads the weights, the others receive them: the same values everywhere, and no file read twice."""

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from kit.picture_models import TINY, write_open_clip, write_picture_model
from kit.ranks import RankPool
from kit.text_models import TEXTS, embed, load_any, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from vembed.distributed.fsdp import shard_encoder
from vembed.distributed.ranks import Ranks
from vembed.distributed.shards import full_tensors
from vembed.distributed.starting_weights import Outline
from vembed.models.adapters import add_adapters, base_fingerprint, freeze
from vembed.models.encoder import Encoder
from vembed.models.from_scratch import TinyClip
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.plan.problem import Way
from vembed.training import model as run_model
from vembed.training.model import build_alike, start_alike
from vembed.vectors.provenance import Key, model_key

CPU = torch.device("cpu")
TEXT_FAMILIES = ("bert", "modernbert", "qwen3", "gpt2", "t5", "bidirectional gemma3")
PICTURE_FAMILIES = ("clip", "siglip", "vit", "dinov2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder of each family, with its name."""
    root = tmp_path_factory.mktemp("models")
    made = {kind: write_model(root / kind, kind) for kind in TEXT_FAMILIES}
    made |= {kind: write_picture_model(root / kind, kind) for kind in PICTURE_FAMILIES}
    made["open_clip"] = write_open_clip(root / "open_clip")
    torch.manual_seed(0)
    TinyClip(TINY).save(root / "tiny-clip")
    return made | {"tiny-clip": root / "tiny-clip"}


def keys_of(folder: Path) -> ModelKeys:
    return ModelKeys(model_name=str(folder), torch_dtype="bfloat16" if folder.name == "qwen3" else "float32")


def build(folder: Path, lora: bool, with_weights: bool) -> Encoder:
    torch.manual_seed(1)
    encoder = load_encoder(keys_of(folder), with_weights=with_weights)
    if lora:
        add_adapters(encoder, AdapterKeys())
        encoder.trained = replace(encoder.trained, base=base_fingerprint(encoder) if with_weights else None)
    return encoder


def tensors_of(encoder: Encoder) -> dict[str, Tensor]:
    """Return parameters and buffers, those without a place in a file included."""
    tensors = chain(encoder.named_parameters(), encoder.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors}


def start_on(rank: int, folder: Path, lora: bool) -> tuple[int, str | None, dict[str, Tensor], Tensor | None]:
    """Start a replicated run; the second rank has a folder without weights. Return its bytes before it receives any."""
    ranks = Ranks.of_this_process()
    own = folder if rank == 0 else folder.parent / "without" / folder.name
    encoder = build_alike(lambda with_weights: build(own, lora, with_weights), ranks)
    held = sum(each.nbytes for each in encoder.parameters() if not each.is_meta)
    runtime: Any = SimpleNamespace(ranks=ranks, device=CPU)
    start_alike(encoder, runtime, with_buffers=False)
    z = embed(encoder.eval(), TEXTS) if "text" in encoder.modalities else None
    return held, encoder.trained.base, tensors_of(encoder), z


def key_on(rank: int, folder: Path) -> tuple[str, Key]:
    """Start a run that trains everything; return what trains, and what vectors on disk are known by."""

    def built(with_weights: bool) -> Encoder:
        encoder = build(folder, False, with_weights)
        freeze(encoder, "all")
        return encoder

    ranks = Ranks.of_this_process()
    encoder = build_alike(built, ranks)
    runtime: Any = SimpleNamespace(ranks=ranks, device=CPU)
    start_alike(encoder, runtime, with_buffers=False)
    return encoder.trained.words, model_key(encoder)


def shard_on(rank: int, folder: Path) -> tuple[list[tuple[str, Tensor | None]], dict[str, Tensor]]:
    """Shard an encoder that the second rank has no weights of; return the whole weights, and this rank's buffers."""
    ranks = Ranks.of_this_process()
    own = folder if rank == 0 else folder.parent / "without" / folder.name
    encoder = build_alike(lambda with_weights: build(own, True, with_weights), ranks)
    shard_encoder(encoder, Way("fsdp", mode="lean", sharding_factor=2), ranks, device=CPU)
    return list(full_tensors(encoder, ranks)), dict(encoder.named_buffers())


@pytest.mark.slow
def test_both_processes_know_a_model_without_its_pooler_by_one_key(
    folders: dict[str, Path], two_ranks: RankPool
) -> None:
    folder = Path(shutil.copytree(folders["bert"], folders["bert"].parent / "no pooler"))
    weights = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in weights.items() if "pooler" not in name}, folder / "model.safetensors")
    (trains, key), (other_trains, other_key) = two_ranks.run(key_on, folder)
    assert trains == other_trains
    assert key == other_key


def without_weights(folder: Path) -> None:
    copy = folder.parent / "without" / folder.name
    if not copy.exists():
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))


OTHERS = (*TEXT_FAMILIES[2:], *PICTURE_FAMILIES[1:])


@pytest.mark.parametrize(
    "kind",
    [
        "bert",
        "modernbert",
        "clip",
        "open_clip",
        "tiny-clip",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS),
    ],
)
def test_the_second_process_reads_no_weights_and_has_all_of_them(
    folders: dict[str, Path], two_ranks: RankPool, kind: str
) -> None:
    folder, lora = folders[kind], kind in ("bert", "clip")
    without_weights(folder)
    (held, base, first, z), (other_held, other_base, second, other_z) = two_ranks.run(start_on, folder, lora)
    expected = tensors_of(build(folder, lora, with_weights=True))
    assert held > 0
    assert other_held == 0, "it held parameters before it received any"
    assert (base is not None, other_base) == (lora, base)
    assert expected.keys() == first.keys() == second.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == first[name].dtype == second[name].dtype, name
        assert torch.equal(tensor, first[name]), name
        assert torch.equal(tensor, second[name]), name
    if z is not None:
        assert other_z is not None
        assert torch.equal(z, other_z)
        assert torch.equal(z, embed(load_any(folder, dtype=getattr(torch, keys_of(folder).torch_dtype)).eval(), TEXTS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "qwen3", "open_clip"])
def test_a_sharded_encoder_gets_its_weights_from_the_first_process(
    folders: dict[str, Path], two_ranks: RankPool, kind: str
) -> None:
    without_weights(folders[kind])
    (whole, buffers), (_, other_buffers) = two_ranks.run(shard_on, folders[kind])
    encoder = build(folders[kind], True, with_weights=True)
    expected = encoder.state_dict()
    assert [name for name, _ in whole] == list(expected)
    assert all(tensor is not None and torch.equal(tensor, expected[name]) for name, tensor in whole)
    for name, buffer in encoder.named_buffers():
        assert buffer.dtype == buffers[name].dtype == other_buffers[name].dtype
        assert torch.equal(buffer, buffers[name])
        assert torch.equal(buffer, other_buffers[name])


class Odd(torch.nn.Module):
    """A layer, and a head that may be left out."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 2)
        self.head = torch.nn.Linear(2, 2)


def test_an_outline_leaves_out_what_the_first_process_has_none_of_and_refuses_what_differs() -> None:
    first = Odd().half().eval()
    first.head = None  # type: ignore[assignment]
    first.layer.bias.requires_grad_(requires_grad=False)
    outline = Outline.of(first)
    with torch.device("meta"):
        model, wide, odd = Odd(), Odd(3), Odd()
        odd.table = torch.zeros(2)  # type: ignore[assignment]
    assert outline.fit(model) == ""
    assert model.head is None
    assert not model.training
    assert (model.layer.bias.dtype, model.layer.bias.requires_grad) == (torch.float16, False)
    assert outline.fit(wide) == "layer.weight differs in this process"
    assert outline.fit(odd) == "table is a tensor but no buffer, so it can't be received"


class Buffered(torch.nn.Module):
    """Its buffers are other tensors once it was moved, as those of any module are that moves to an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))

    def to(self, device: torch.device) -> Self:  # type: ignore[override]
        self.register_buffer("table", torch.ones(2))
        return self


def test_the_buffers_that_are_received_are_those_of_the_moved_model(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Tensor] = []
    monkeypatch.setattr(run_model, "receive", lambda tensors, *_: received.extend(tensors))
    model: Any = Buffered()
    start_alike(model, SimpleNamespace(ranks=Ranks(), device=CPU), with_buffers=True)  # type: ignore[arg-type]
    assert [id(each) for each in received] == [id(model.table)]
