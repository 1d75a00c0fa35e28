"""How many data workers there are: spare cores, pictures and memory decide."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vembed.config.schema import Config
from vembed.plan.batch import ROW_BYTES, plan_loading
from vembed.plan.devices import Machine
from vembed.plan.problem import DataSize

if TYPE_CHECKING:
    import pytest

CPU = Machine("cpu", "the CPU", 16 << 30, 8, fast_bf16=False, num_busy_cores=6)
PICTURES = DataSize(1000, 1.0, pictures_per_record=1.0, picture_bytes=12_288)


def planned(
    machine: Machine, data: DataSize, num_workers: int | str = "auto", *, host_bytes: int = 16 << 30
) -> tuple[int, int, str]:
    config = Config.model_validate({"model_name": "builtin:tiny-clip", "num_workers": num_workers})
    loading = plan_loading(config, machine, data, num_queries=100, host_bytes=host_bytes)
    return loading.num_workers, loading.batches_ahead, loading.reason


def test_auto_takes_the_cores_that_training_leaves_where_there_are_pictures() -> None:
    assert planned(CPU, PICTURES)[:2] == (2, 4)
    assert "8 cores less 6 that training keeps busy leave 2" in planned(CPU, PICTURES)[2]
    assert planned(replace(CPU, num_busy_cores=8), PICTURES)[:2] == (0, 0)
    assert planned(replace(CPU, num_cores=64, num_busy_cores=1), PICTURES)[0] == 8
    texts = replace(PICTURES, pictures_per_record=0.0)
    assert planned(CPU, texts) == (0, 0, "num_workers 0: no pictures to decode")
    assert planned(CPU, texts, 3)[:2] == (3, 6)
    assert planned(CPU, PICTURES, 0)[0] == 0


def test_who_sets_the_batches_of_a_worker_gets_them() -> None:
    keys = Config.model_validate({"model_name": "builtin:tiny-clip", "num_workers": 3, "prefetch_factor": 5})
    loading = plan_loading(keys, CPU, PICTURES, num_queries=100, host_bytes=16 << 30)
    assert loading.batches_ahead == 15
    assert "up to 15 batches ahead" in loading.reason


def test_texts_are_tokenized_by_workers_where_an_accelerator_computes() -> None:
    machine = replace(CPU, device="cuda", num_busy_cores=1)
    texts = replace(PICTURES, pictures_per_record=0.0, picture_bytes=0)
    assert planned(machine, texts)[:2] == (7, 14)
    assert "8 cores less 1 that training keeps busy leave 7, of which at most 8 tokenize" in planned(machine, texts)[2]
    assert "up to 14 batches ahead, 10.9 MiB of tokens" in planned(machine, texts)[2]
    assert planned(replace(machine, num_cores=1), texts)[:2] == (0, 0)
    three_batches = 8 * 3 * 200 * ROW_BYTES
    assert planned(machine, texts, host_bytes=three_batches)[:2] == (3, 3)


def test_batches_ahead_stay_within_a_share_of_memory() -> None:
    machine, one_batch = replace(CPU, num_busy_cores=0), 8 * 100 * 1000  # of 100 pictures of 1000 bytes

    def of(picture_bytes: int, num_workers: int | str = "auto") -> tuple[int, int]:
        return planned(machine, replace(PICTURES, picture_bytes=picture_bytes), num_workers, host_bytes=one_batch)[:2]

    assert of(1000 // 16) == (8, 16)
    assert of(1000 // 10) == (8, 8)
    assert of(1000 // 2) == (2, 2)
    assert of(1001) == (0, 0)
    assert of(1001, 3) == (3, 3), "who sets a number gets it"
    config = Config.model_validate({"model_name": "builtin:tiny-clip"})
    small = replace(PICTURES, picture_bytes=1000 // 16)
    shared = plan_loading(config, machine, small, num_queries=100, host_bytes=one_batch, num_processes=4)
    assert (shared.num_workers, shared.batches_ahead) == (4, 4), "four processes of a machine share its memory"


def test_auto_is_none_where_workers_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert planned(CPU, PICTURES) == (0, 0, "num_workers 0: data workers need Linux")
