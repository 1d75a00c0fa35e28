"""Checkpoints of several processes: any number of them loads what any number saved, and all have one outcome."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import flip_byte, names_in
from kit.ranks import RankPool
from spread_cases import (
    Kind,
    folder_of_own,
    load_and_train,
    save_nan_of_one_rank,
    save_where_one_fails,
    save_with_free_bytes,
    set_aside,
    train_and_save,
    what_loads,
)
from test_checkpoint_faults import set_version
from torch import Tensor

from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import SharedTensor, read_block, whole
from vembed.distributed.shards import Block

STEP = "step-00000003"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def differ(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in left if not torch.equal(left[name], right[name]))


@pytest.mark.parametrize("saved_as", ["sharded", "replicated shards", "whole"])
def test_what_two_ranks_saved_loads_bit_for_bit_whole_and_in_shards_on_one_process_and_on_two(
    two_ranks: RankPool, tmp_path: Path, saved_as: Kind
) -> None:
    (saved, later), other = two_ranks.run(train_and_save, tmp_path, saved_as)
    assert_equal(other[0], saved)
    assert differ(saved, later)
    assert_equal(load_and_train(0, tmp_path, "whole")[0], saved)
    for loaded_as in ("sharded", "replicated shards", "whole"):
        for found, after in two_ranks.run(load_and_train, tmp_path, loaded_as):
            assert_equal(found, saved)
            if loaded_as == saved_as:
                assert_equal(after, later)


def test_what_one_process_saved_loads_bit_for_bit_in_shards(two_ranks: RankPool, tmp_path: Path) -> None:
    saved, later = train_and_save(0, tmp_path, "whole")
    assert_equal(load_and_train(0, tmp_path, "whole")[1], later)
    for found, _ in two_ranks.run(load_and_train, tmp_path, "sharded"):
        assert_equal(found, saved)


def test_each_rank_writes_its_own_shards_and_of_equal_copies_the_first_alone(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for kind in ("sharded", "replicated shards", "whole"):
        two_ranks.run(train_and_save, tmp_path / kind, kind)
    common = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    firsts = ["model.rank-00000-of-00002.safetensors", "optimizer.rank-00000-of-00002.safetensors"]
    seconds = ["model.rank-00001-of-00002.safetensors", "optimizer.rank-00001-of-00002.safetensors"]
    assert names_in(tmp_path / "sharded" / STEP) == sorted(common + firsts + seconds)
    assert names_in(tmp_path / "replicated shards" / STEP) == sorted(common + firsts)
    assert names_in(tmp_path / "whole" / STEP) == common
    folder = tmp_path / "sharded" / STEP
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == names_in(folder)
    loaded = CheckpointManager(tmp_path / "sharded").load("auto")
    assert loaded is not None
    weight = loaded.tensors["model"]["first.weight"]
    assert isinstance(weight, SharedTensor)
    assert [(block.offsets, block.sizes) for block, _ in weight.pieces] == [((0, 0), (3, 3)), ((3, 0), (2, 3))]
    assert isinstance(loaded.tensors["model"]["scale"], torch.Tensor)


@pytest.mark.parametrize("damage", ["flip", "missing", "truncate"])
def test_damage_to_one_ranks_file_is_the_same_outcome_on_all_and_the_checkpoint_before_loads(
    two_ranks: RankPool, tmp_path: Path, damage: str
) -> None:
    two_ranks.run(train_and_save, tmp_path, "sharded")
    (tmp_path / STEP).rename(tmp_path / "kept")
    train_and_save(0, tmp_path, "whole")
    (tmp_path / STEP).rename(tmp_path / "step-00000002")
    manifest = json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())
    (tmp_path / "step-00000002" / "manifest.json").write_text(json.dumps(manifest | {"step": 2}))
    set_version(tmp_path / "step-00000002", 1)
    (tmp_path / "kept").rename(tmp_path / STEP)
    assert two_ranks.run(what_loads, tmp_path) == [("3", STEP)] * 2
    for name in ("model.rank-00001-of-00002.safetensors", "optimizer.rank-00000-of-00002.safetensors"):
        path = tmp_path / STEP / name
        content = path.read_bytes()
        if damage == "flip":
            flip_byte(path, len(content) - 1)
        elif damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:-1])
        assert two_ranks.run(what_loads, tmp_path) == [("2", "step-00000002")] * 2
        (named, _), other = two_ranks.run(what_loads, tmp_path, STEP)
        assert named == other[0]
        assert named.startswith("InvalidCheckpointError: ")
        assert name in named
        path.write_bytes(content)
    assert two_ranks.run(what_loads, tmp_path) == [("3", STEP)] * 2


def test_a_future_version_is_refused_on_all_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(train_and_save, tmp_path, "sharded")
    set_version(tmp_path / STEP, 2)
    for loaded, _ in two_ranks.run(what_loads, tmp_path):
        assert loaded.startswith("FutureCheckpointError: ")
        assert "Upgrade vembed" in loaded
    set_version(tmp_path / STEP, 1)
    assert two_ranks.run(what_loads, tmp_path) == [("3", STEP)] * 2


@pytest.mark.parametrize(("kind", "failing"), [("sharded", 0), ("sharded", 1), ("whole", 0)])
def test_a_disk_that_refuses_one_rank_fails_the_save_on_all_and_the_third_time_ends_the_run(
    two_ranks: RankPool, tmp_path: Path, kind: Kind, failing: int
) -> None:
    first, second = two_ranks.run(save_where_one_fails, tmp_path, kind, failing)
    assert first == second
    assert first[:2] == ["None", "None"]
    assert first[2].startswith("MachineError: ")
    assert "3 saves in a row failed" in first[2]
    assert "no space for model." in first[2]
    assert ("the last with: process 1: " in first[2]) == (failing == 1)
    assert first[3] == "step-00000004"
    assert names_in(tmp_path) == ["LATEST", "step-00000004"]


def test_weights_that_are_not_finite_on_one_rank_are_saved_by_none(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(save_nan_of_one_rank, tmp_path, float("nan"))
    assert first == second
    assert first.startswith("NonFiniteError: process 1: step 1: model/first.weight holds NaN")
    assert not tmp_path.exists() or names_in(tmp_path) == []
    assert two_ranks.run(save_nan_of_one_rank, tmp_path, 2.0) == ["step-00000001"] * 2


def test_the_disk_must_hold_what_all_ranks_write(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(train_and_save, tmp_path / "measured", "sharded")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "measured" / STEP).iterdir()}
    shards = [size for name, size in sizes.items() if "rank-" in name]
    assert len(shards) == 4
    of_both = 1.2 * (3 * 4 * (15 + 5 + 10 + 5 + 1 + 1) + 4 * 3 + sizes["state.json"])
    free = [int(of_both * 0.9), int(of_both * 1.1)]
    assert two_ranks.run(save_with_free_bytes, tmp_path, free) == [[False, True]] * 2


def test_going_back_renames_once_and_every_rank_knows(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(train_and_save, tmp_path, "sharded")
    assert two_ranks.run(set_aside, tmp_path, 2) == [[f"abandoned-1-{STEP}"]] * 2
    assert two_ranks.run(set_aside, tmp_path, 2) == [[]] * 2
    assert two_ranks.run(what_loads, tmp_path) == [("None", "None")] * 2


def test_a_rank_that_does_not_see_the_folder_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    train_and_save(0, tmp_path / "shared", "whole")
    elsewhere = [tmp_path / "shared", tmp_path / "another machine"]
    for found in two_ranks.run(folder_of_own, elsewhere):
        assert found.startswith("MachineError: ")
        assert "process 1 doesn't; output_dir must be on a file system that all machines share" in found
    assert "LoadedCheckpoint" in two_ranks.run(folder_of_own, [tmp_path / "shared"] * 2)[1]


class Untouchable:
    """Stands for a file that must not be read."""

    def __getitem__(self, key: object) -> None:
        raise AssertionError("read")


def test_only_the_pieces_that_a_block_meets_are_read() -> None:
    table = torch.arange(70.0).reshape(10, 7)
    cuts = [(0, 4), (4, 8), (8, 10)]
    pieces: list[tuple[Block, Any]] = [
        (Block((10, 7), (begin, 0), (end - begin, 7)), table[begin:end]) for begin, end in cuts
    ]
    saved = SharedTensor((10, 7), table.dtype, tuple(pieces))
    for begin in range(10):
        for end in range(begin, 11):
            found = read_block(saved, Block((10, 7), (begin, 2), (end - begin, 3)))
            assert torch.equal(found, table[begin:end, 2:5])
    assert torch.equal(whole(saved), table)
    assert read_block(saved, pieces[1][0]) is pieces[1][1]
    pieces[2] = (pieces[2][0], Untouchable())
    closed = SharedTensor((10, 7), table.dtype, tuple(pieces))
    assert torch.equal(read_block(closed, Block((10, 7), (2, 0), (6, 7))), table[2:8])
    with pytest.raises(AssertionError, match="read"):
        read_block(closed, Block((10, 7), (2, 0), (7, 7)))


def test_a_block_of_a_whole_tensor_is_a_part_of_it() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(read_block(table, Block((4, 3), (1, 1), (2, 2))), table[1:3, 1:3])
    assert read_block(torch.tensor(3.0), Block((), (), ())) == 3.0
