"""The plan of several ranks: one decision, for the smallest of their machines."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from vembed.config.load import load_config
from vembed.config.schema import Config
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import Runtime
from vembed.plan.devices import GIB, NETWORK, Machine, parse_devices
from vembed.training import run as assembly
from vembed.training.planning import _devices, build_plan, plan_elsewhere

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool


def plan_of(rank: int, memory_bytes: list[int]) -> dict[str, Any]:
    config = load_config(None, ["model_name=builtin:tiny-transformer", "batch_size=auto"]).config
    taken = max(memory_bytes) - memory_bytes[rank]
    machine = Machine("cuda", f"GPU {rank}", memory_bytes[rank], 1 + rank, fast_bf16=rank == 0, taken_bytes=taken)
    runtime = Runtime(torch.device("cpu"), machine, Ranks(rank, len(memory_bytes)), rank, len(memory_bytes))
    items = SimpleNamespace(num_pictures=0, has_pictures=False, has_texts=True, modalities={"text"})
    counts = SimpleNamespace(num_records=50_000, num_documents=50_000, items=items)
    data = SimpleNamespace(counts=counts, notes=(), test=None, dev=None, further={}, sources=("rows.jsonl",))
    return build_plan(config, runtime, cast("Any", data)).to_json()


@pytest.mark.slow
def test_ranks_with_unequal_memory_agree_on_the_plan_for_the_smallest(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(plan_of, [64 * GIB, 4 * GIB])
    assert first == second
    assert first["memory_bytes"] == 4 * GIB
    (alone, _) = two_ranks.run(plan_of, [64 * GIB, 64 * GIB])
    assert alone["memory_bytes"] == 64 * GIB
    assert first["dtype"] == "float32", "one of them only emulates bfloat16"
    assert any("other programs hold 60.0 GiB beside it" in reason for reason in first["reasons"])
    assert not any("other programs" in reason for reason in alone["reasons"])


def test_machines_with_unequal_numbers_of_processes_are_all_counted() -> None:
    machine = Machine("cuda", "H100", 79 * GIB, 8, fast_bf16=True)
    for world_size, nodes in ((8, 1), (12, 2), (20, 3)):  # srun started 8, 8 and 4
        runtime = Runtime(torch.device("cpu"), machine, Ranks(0, world_size), local_world_size=8)
        assert _devices(runtime).nodes == nodes
        assert _devices(runtime).bandwidth(world_size) == (450 if nodes == 1 else NETWORK)


def test_devices_elsewhere_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.training.planning.cpu_cores", lambda: 16)
    config = load_config(None, ["model_name=builtin:tiny-transformer", "batch_size=8"]).config
    for devices, cores in (("1x24GB", "16 cores"), ("2x4x24GB", "4 cores"), ("2x32x24GB", "1 core")):
        made = plan_elsewhere(config, parse_devices(devices), shape=None, num_records=1000)
        assert any(f": {cores} less 1 that training keeps busy" in reason for reason in made.reasons), devices


@pytest.mark.slow
def test_a_model_that_several_devices_share_is_planned_without_bringing_it_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query": f"query {number}", "positive": f"text {number}"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    machine = Machine("cuda", "a small card", 24 * GIB, 8, fast_bf16=True)
    runtime = Runtime(torch.device("meta"), machine, local_world_size=2)
    monkeypatch.setattr(assembly, "start_runtime", lambda **_: runtime)
    loaded = []
    build = assembly.build_encoder
    monkeypatch.setattr(
        assembly, "build_encoder", lambda *args, **keys: loaded.append(build(*args, **keys)) or loaded[0]
    )
    output = tmp_path / "output"
    config = Config(
        model_name="builtin:tiny-transformer",
        data_path=str(tmp_path / "rows.jsonl"),
        use_fsdp=True,
        batch_size=4,
        output_dir=str(output),
    )
    assembly.run_from_config(config, mode="plan")
    assert json.loads((output / "plan.json").read_text())["strategy"] == "fsdp"
    assert {each.device.type for each in loaded[0].parameters()} == {"cpu"}
