"""A run whose hard batches are chosen anew every n epochs: killed while they are chosen, resumed, on two processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.runs import Killed, Outcome, Site, assert_same_run, run_here, run_keys, run_killed, write_config
from kit.several_ranks import exact, run_ranks

from vembed.vectors.items import StoredSide

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.monkeypatch import MonkeyPatch

STEPS_PER_EPOCH = 6
KEYS = {
    "batch_sampling": "hard",
    "hard_refresh": 1,
    "max_steps": 14,
    "save_steps": 4,
    "eval_steps": 7,
    "gradient_cache_chunk_size": 16,
    "num_workers": 0,
}


@pytest.fixture(scope="module")
def whole(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nothing stopped."""
    outcome = run_keys(tmp_path_factory.mktemp("whole"), site.keys(**KEYS))
    assert outcome.code == 0, outcome.err
    return outcome


def vectors_of(outcome: Outcome, epoch: int) -> Any:
    return np.load(outcome.folder / "hard_vectors" / f"epoch-{epoch:05}.npz")["vectors"]


def test_batches_are_chosen_anew_before_each_epoch_and_plan_and_report_say_so(whole: Outcome, site: Site) -> None:
    names = sorted(path.name for path in (whole.folder / "hard_vectors").iterdir())
    assert names == [f"epoch-0000{epoch}.npz" for epoch in (1, 2, 3)]
    assert not np.array_equal(vectors_of(whole, 1), vectors_of(whole, 2)), "the model has changed"
    reasons = json.loads((whole.folder / "plan.json").read_text("utf-8"))["reasons"]
    assert any("hard: before epoch 1 and every epoch the model as it then is encodes" in each for each in reasons)
    report = json.loads((whole.folder / "report" / "report.json").read_text("utf-8"))
    assert "hard batches chosen before epoch 3" in json.dumps(report)


@pytest.mark.slow
@pytest.mark.parametrize("encoded", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_while_it_chooses_goes_on_as_if_nothing_had_been(
    encoded: int, whole: Outcome, site: Site, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    config, count = write_config(tmp_path, site.keys(**KEYS)), 0

    def killed(self: StoredSide, *given: Any, before: Any = StoredSide.get) -> Any:
        nonlocal count
        count += 1
        if count > encoded:  # two sides at each choice
            raise Killed
        return before(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(StoredSide, "get", killed)
        with pytest.raises(Killed):
            run_here(config)
    folder = tmp_path / "out" / "hard_vectors"
    assert (folder / "work-00003").is_dir() == (encoded == 5)
    outcome = run_here(config)
    assert outcome.code == 0, outcome.err
    assert not (folder / "work-00003").exists()
    assert_same_run(outcome.folder, whole.folder)
    assert np.array_equal(vectors_of(outcome, 3), vectors_of(whole, 3))


@pytest.mark.slow
def test_a_run_that_is_killed_inside_an_epoch_reads_what_its_batches_were_chosen_by(
    whole: Outcome, site: Site, tmp_path: Path
) -> None:
    config = write_config(tmp_path, site.keys(**KEYS))
    run_killed(config, after=10)
    outcome = run_here(config)
    assert outcome.code == 0, outcome.err
    assert_same_run(outcome.folder, whole.folder)


@pytest.mark.slow
def test_data_workers_and_mining_beside_it_make_the_same_batches(site: Site, tmp_path: Path) -> None:
    both = KEYS | {"mine": 2, "mine_negatives": 1, "mine_range_max": 40}
    one, two = (run_keys(tmp_path / f"{count}", site.keys(**both | {"num_workers": count})) for count in (0, 1))
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert one.same_rows == two.same_rows
    assert [path.name for path in sorted((one.folder / "mining").glob("*.npz"))] == [
        "epoch-00001.npz",
        "epoch-00003.npz",
    ]


@pytest.mark.slow
def test_two_processes_choose_as_one_does(site: Site, tmp_path: Path) -> None:
    one = run_keys(tmp_path / "1", exact(site, **KEYS))
    two = run_ranks(write_config(tmp_path / "2", exact(site, **KEYS | {"batch_size": 8, "num_processes": 2})))
    assert (one.code, two.code) == (0, 0), two.err
    assert two.losses == pytest.approx(one.losses, abs=1e-9)
    assert np.array_equal(vectors_of(one, 3), vectors_of(two, 3))
