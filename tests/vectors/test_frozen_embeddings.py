"""Embeddings of a frozen tower: each item is encoded once, read from disk ever after, and never when it isn't true."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

from vembed.batch import Augmentation, modality_of
from vembed.config.schema import Config
from vembed.data.read import DataSource
from vembed.data.sampler import GlobalSampler
from vembed.distributed.fsdp import shard_encoder
from vembed.distributed.ranks import Ranks
from vembed.distributed.shards import is_shared
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.passes import Passes, RngState
from vembed.losses.infonce import InfoNCE
from vembed.models.adapters import freeze
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.plan.problem import Way
from vembed.training.batches import BatchSource, pools_of
from vembed.training.run import run_from_config
from vembed.vectors import frozen
from vembed.vectors.encode import ItemEncoder
from vembed.vectors.frozen import FrozenItems, find_frozen

if TYPE_CHECKING:
    from kit.ranks import RankPool

    from vembed.data.table import RecordTable


CPU = torch.device("cpu")


NUM_ROWS, NUM_PICTURES, BATCH = 8, 6, 4


STEPS = 2 * NUM_ROWS // BATCH


BUDGET = ChunkBudget(3, 10**6)


def write_data(folder: Path) -> Path:
    """Write captions of pictures; two pictures have two captions."""
    rows = []
    for number in range(NUM_ROWS):
        content = io.BytesIO()
        colour = (40 * (number % NUM_PICTURES), 255 - 30 * (number % NUM_PICTURES), 7)
        PIL.Image.new("RGB", (9, 9), colour).save(content, "PNG")
        (folder / f"{number}.png").write_bytes(content.getvalue())
        rows.append({"query": f"caption {number} of it", "positive_image": f"{number}.png"})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def new_encoder(trainable: str = "text", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> TinyClip:
    torch.manual_seed(seed)
    encoder = TinyClip(TinyClipConfig(dimension=8, image_size=16, channels=(8,), buckets=64)).to(dtype)
    freeze(encoder, trainable)
    return encoder.train()


class Watched:
    """Counts rows and calls of an encoder by what they are."""

    def __init__(self, encoder: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        encoder.register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        kind = "pictures" if "pixels" in inputs[0] else "texts"
        self.calls[kind] += 1
        self.rows[kind] += len(output)


@dataclass(frozen=True)
class Site:
    """Records and where embeddings go."""

    records: RecordTable
    folder: Path

    def find(self, encoder: TinyClip, folder: Path | None = None, **changes: Any) -> FrozenItems:
        plain = {
            "is_shared": False,
            "epochs": 2.0,
            "augments": False,
            "precision": "float32",
            "passes": Passes(CPU),
        }
        return find_frozen(encoder, self.records, folder or self.folder, **{**plain, **changes})


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(DataSource(str(write_data(tmp_path)), "train").records().table, tmp_path / "kept")


def encode_with(encoder: TinyClip, ranks: Ranks | None = None) -> ItemEncoder:
    return ItemEncoder(encoder, BUDGET, CPU, ranks=ranks or Ranks())


def train(
    site: Site,
    encoder: TinyClip,
    found: FrozenItems | None,
    *,
    first: int = 0,
    last: int = STEPS,
    ranks: Ranks | None = None,
) -> list[float]:
    """Train two epochs by plain gradient descent, and return the losses."""
    ranks = ranks or Ranks()
    stored = None if found is None else found.stored(encode_with(encoder, ranks))
    source = BatchSource(
        site.records, GlobalSampler(len(site.records), batch_size=BATCH, seed=3), encoder, CPU,
        Augmentation("none", flip=False, seed=0), rank=ranks.rank, world_size=ranks.world_size, stored=stored,
    )  # fmt: skip
    trainable = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    loss = InfoNCE(temperature=0.2, bidirectional=True)
    engine = GradCacheEngine(loss, EngineOptions(BUDGET, CPU, ranks=ranks), trainable)
    losses = []
    for step in range(first, last):
        batch = source.batch(step)
        losses.append(engine.step(pools_of(batch, encoder), batch.structure, assignment=batch.assignment).loss)
        with torch.no_grad():
            for parameter in trainable:
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
                    parameter.grad = None
    return losses


def test_each_picture_is_encoded_once_and_training_is_the_same_to_rounding(site: Site) -> None:
    plain, kept = new_encoder(), new_encoder()
    expected = train(site, plain, None)
    watched = Watched(kept)
    found = site.find(kept)
    watched.rows.clear()
    losses = train(site, kept, found)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not torch.equal(next(plain.text.parameters()), next(new_encoder().text.parameters())), "it did train"
    assert watched.rows["pictures"] == NUM_PICTURES
    assert watched.rows["texts"] == 2 * 2 * NUM_ROWS, "both passes of both epochs"
    for name, parameter in plain.named_parameters():
        assert torch.allclose(parameter, dict(kept.named_parameters())[name], atol=1e-6), name


def test_after_the_first_time_no_picture_is_encoded_or_decoded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(site, new_encoder(), site.find(new_encoder()))
    encoder = new_encoder()
    found = site.find(encoder)
    watched = Watched(encoder)
    monkeypatch.setattr(encoder, "featurize_pictures", lambda images: pytest.fail("a picture was decoded"))
    assert train(site, encoder, found) == first
    assert watched.calls.keys() == {"texts"}


def test_a_run_that_goes_on_reads_what_it_wrote(site: Site) -> None:
    whole = train(site, new_encoder(), site.find(new_encoder()))
    encoder = new_encoder()
    begun = train(site, encoder, site.find(encoder), last=2)
    watched, found = Watched(encoder), site.find(encoder)  # its text tower is trained by now
    watched.calls.clear()
    assert begun + train(site, encoder, found, first=2) == whole
    assert watched.calls["pictures"] == 0


def only_table(found: FrozenItems, encoder: TinyClip) -> np.ndarray:
    stored = found.stored(encode_with(encoder))
    assert stored is not None
    [(_, vectors)] = stored.tables.values()
    return np.array(vectors)


def test_other_frozen_weights_are_never_served_by_old_embeddings(site: Site) -> None:
    encoder = new_encoder()
    before = only_table(site.find(encoder), encoder)
    with torch.no_grad():
        next(encoder.vision.parameters()).mul_(1.5)[0] += 0.1
    after = only_table(site.find(encoder), encoder)
    fresh = encode_with(encoder)([site.records[0].positives[0]], "document")
    assert not np.allclose(before, after)
    assert any(np.allclose(fresh[0], row, atol=1e-6) for row in after)
    with torch.no_grad():
        next(encoder.text.parameters()).add_(1.0)  # trained: it doesn't count
    watched = Watched(encoder)
    found = site.find(encoder)
    watched.calls.clear()
    assert np.array_equal(only_table(found, encoder), after)
    assert not watched.calls


def test_precision_is_part_of_the_key_and_items_are_looked_up(site: Site) -> None:
    encoder = new_encoder()
    [own] = site.find(encoder).sides
    [other_precision] = site.find(encoder, precision="bfloat16").sides
    fewer = replace(site, records=site.records.subset([0, 1, 2]))
    [other_items] = fewer.find(encoder).sides
    assert own.store.path(own.items.items) != other_precision.store.path(own.items.items)
    assert (own.store, len(other_items.items)) == (other_items.store, 3)
    assert site.find(encoder).sides[0].store == own.store


def test_a_set_that_has_grown_pays_for_its_new_items_alone(site: Site) -> None:
    encoder, fewer = new_encoder(), replace(site, records=site.records.subset([0, 1, 2]))
    only_table(fewer.find(encoder), encoder)
    found, watched = site.find(encoder), Watched(encoder)
    whole = only_table(found, encoder)
    assert watched.rows["pictures"] == NUM_PICTURES - 3
    assert np.array_equal(whole, only_table(site.find(encoder, site.folder / "other"), encoder))


def test_the_plan_says_what_is_kept_and_a_full_disk_does_without(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = site.find(new_encoder())
    [note] = found.notes
    assert f"{NUM_PICTURES} pictures (document)" in note
    assert f"{NUM_PICTURES * 8 * 4} bytes" in note
    assert only_table(found, new_encoder()).nbytes == NUM_PICTURES * 8 * 4
    monkeypatch.setattr(frozen, "FREE_SHARE", 1e18)
    full = site.find(new_encoder(), site.folder / "full")
    assert (full.sides, len(full.notes)) == ((), 1)


class NoisyVision(TinyClip):
    """Dropout of its own in the image tower, which freezing leaves on."""

    def embed_pictures(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.dropout(super().embed_pictures(inputs), 0.1, training=True)


def test_what_is_random_changed_or_seen_once_is_encoded_as_it_comes(site: Site) -> None:
    encoder = new_encoder()
    assert len(site.find(encoder).sides) == 1
    augmented = site.find(encoder, augments=True)
    assert (augmented.sides, "image_augmentation" in augmented.notes[0]) == ((), True)
    short = site.find(encoder, epochs=0.5)
    assert (short.sides, "only once" in short.notes[0]) == ((), True)
    assert len(site.find(encoder, epochs=0.5, is_shared=True).sides) == 1, "other runs will want them"
    encoder.__class__ = NoisyVision
    noisy = site.find(encoder)
    assert (noisy.sides, "dropout" in noisy.notes[0]) == ((), True)


def test_nothing_is_kept_of_towers_that_train_and_a_folder_for_it_is_said_to_be_idle(site: Site) -> None:
    whole = new_encoder("all")
    assert (site.find(whole).sides, site.find(whole).notes) == ((), ())
    [note] = site.find(whole, is_shared=True).notes
    assert "no effect" in note
    projection = new_encoder("projection")
    watched = Watched(projection)
    found = site.find(projection)
    assert {modality_of(site.records[0].query)} == {"text"}
    assert [side.items.modality for side in found.sides] == ["text"], (
        "behind a projection that trains nothing stays the same"
    )
    assert max(watched.rows.values()) == 1, "looking costs one item of each kind"
    in_double = new_encoder(dtype=torch.float64)
    assert "float64" in site.find(in_double, is_shared=True).notes[0]


def test_looking_needs_the_weights_and_leaves_mode_and_random_state_alone(site: Site) -> None:
    with pytest.raises(ValueError, match="weights"):
        site.find(new_encoder().to("meta"))
    encoder = new_encoder().eval()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert site.find(encoder).sides
    assert torch.equal(before, torch.get_rng_state())
    assert not encoder.training


def on_rank(rank: int, folder: str) -> tuple[list[float], int]:
    site = Site(DataSource(f"{folder}/rows.jsonl", "train").records().table, Path(folder) / "kept")
    encoder = new_encoder()
    found, watched = site.find(encoder), Watched(encoder)
    return train(site, encoder, found, ranks=Ranks.of_this_process()), watched.rows["pictures"]


def test_ranks_share_the_encoding_and_read_one_file(two_ranks: RankPool, site: Site, tmp_path: Path) -> None:
    alone = train(site, new_encoder(), None)
    for num_pictures in (NUM_PICTURES // 2, 0):  # the second time they read what the first one wrote
        for losses, encoded in two_ranks.run(on_rank, str(tmp_path)):
            assert losses == pytest.approx(alone, rel=1e-5)
            assert encoded == num_pictures


class MixedVision(TinyClip):
    """An image tower whose attention takes no float32, as flash attention's, and only tensors of one device."""

    def embed_pictures(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16, "FlashAttention only support fp16 and bf16 data type"
        assert torch.is_autocast_enabled("cpu")
        return super().embed_pictures(inputs)


def test_looking_computes_in_the_precision_of_the_run(site: Site) -> None:
    encoder = new_encoder()
    encoder.__class__ = MixedVision
    found = site.find(encoder, precision="bfloat16", passes=Passes(CPU, torch.bfloat16))
    assert [side.items.modality for side in found.sides] == ["image"]


class Elsewhere(TinyClip):
    """Towers that compute elsewhere than their weights are, as sharded ones do."""

    def embed_pictures(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert {each.device.type for each in inputs.values()} == {"meta"}
        return torch.empty(1, self.dimension, device="meta")

    def embed_texts(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.embed_pictures(inputs)


def test_looking_computes_on_the_device_of_the_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = new_encoder()
    encoder.__class__ = Elsewhere
    present = RngState.capture(CPU)
    monkeypatch.setattr(RngState, "capture", staticmethod(lambda _: present))
    assert site.find(encoder, passes=Passes(torch.device("meta"))).sides


def sharded_on(rank: int, folder: str) -> list[tuple[str, ...]]:
    """Look for frozen towers in a model whose weights two ranks share."""
    site = Site(DataSource(f"{folder}/rows.jsonl", "train").records().table, Path(folder) / "kept")
    encoder, ranks = new_encoder(), Ranks.of_this_process()
    whole = site.find(encoder)
    found = []
    for mode in ("fast", "lean"):
        encoder = new_encoder()
        way = Way("fsdp", mode=mode, sharding_factor=2)  # type: ignore[arg-type]
        sharded = shard_encoder(encoder, way, ranks, device=CPU)
        items = site.find(encoder, sharded=sharded)
        assert items.notes == whole.notes
        assert [side.store.key for side in items.sides] == [side.store.key for side in whole.sides]
        assert all(is_shared(each) for each in encoder.parameters() if each.ndim > 0), "the shards are back"
        found.append(tuple(side.items.modality for side in items.sides))
    return found


def test_a_frozen_tower_is_found_where_ranks_share_its_weights_under_the_same_key(
    two_ranks: RankPool, site: Site, tmp_path: Path
) -> None:
    assert two_ranks.run(sharded_on, str(tmp_path)) == [[("image",), ("image",)]] * 2


@pytest.mark.slow
def test_a_run_with_a_frozen_tower_says_so_and_learns_the_same(tmp_path: Path) -> None:
    manifest, losses = write_data(tmp_path), {}
    for cache in ("auto", "never"):
        output = tmp_path / cache
        values = {
            "model_name": "builtin:tiny-clip",
            "data_path": str(manifest),
            "test_data_path": str(manifest),
            "trainable": "text",
            "batch_size": BATCH,
            "epochs": 2,
            "eval_strategy": "no",
            "bm25": False,
            "report_to": "none",
            "embedding_cache": cache,
            "output_dir": str(output),
        }
        run_from_config(Config.model_validate(values))
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        losses[cache] = [row["loss"] for row in rows if "loss" in row]
        reasons = json.loads((output / "plan.json").read_text())["reasons"]
        assert any(f"{NUM_PICTURES} pictures" in reason for reason in reasons) == (cache == "auto")
        assert (output / "frozen_embeddings").is_dir() == (cache == "auto")
    assert len(losses["auto"]) == STEPS
    assert losses["auto"] == pytest.approx(losses["never"], rel=1e-5)
