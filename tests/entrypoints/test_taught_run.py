"""Runs whose loss learns from a teacher: asked before step 1, kept through a kill, told in the plan, resumed alike."""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Site, assert_same_run, run_keys, run_process, steps_saved, write_config
from kit.several_ranks import run_ranks
from safetensors.torch import load_file, save_file

from vembed.errors import PreemptedError
from vembed.gradcache.engine import GradCacheEngine
from vembed.registry import LOSSES
from vembed.vectors.store import VectorStore

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = '''
import vembed
from vembed.losses.base import ContrastiveLoss
from vembed.losses.registry import LossSection


class TaughtKeys(LossSection):
    """Facts of the loss of a teacher's similarities."""

    name = "taught"
    reads_teacher = True


@vembed.register_loss
class Taught(ContrastiveLoss):
    """All similarities are to be the teacher's."""

    keys = TaughtKeys

    def forward(self, q_QE, d_DE, structure):
        return (q_QE @ d_DE.T - structure.teacher_Q @ structure.teacher_D.T).square().mean()


'''


@pytest.fixture(autouse=True)
def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taught_losses.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(LOSSES, table, dict(getattr(LOSSES, table)))
    monkeypatch.delitem(sys.modules, "taught_losses", raising=False)


def taught(site: Site, **changes: Any) -> dict[str, Any]:
    return site.keys(
        model_name="builtin:ngram-bag", learning_rate=0.1, teacher_model_name=str(site.bert_without_dropout),
        plugins=["taught_losses"], loss_type="taught", temperature=None, max_steps=6, eval_strategy="no",
        eval_steps=None, save_steps=3, **changes,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_asks_its_teacher_once_and_goes_on_as_if_it_had_never_stopped(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_keys(tmp_path / "whole", taught(site))
    assert whole.code == 0, whole.err
    assert whole.losses[-1] < 0.8 * whole.losses[0]
    reasons = json.loads((whole.folder / "plan.json").read_text())["reasons"]
    assert any("once, before step 1" in reason and str(site.bert_without_dropout) in reason for reason in reasons)
    asked: list[str] = []

    def count(self: VectorStore, *parts: Any, fill: Any = VectorStore._fill) -> Any:
        asked.append(self.name.rpartition("-")[2])
        if asked == ["query", "document"]:
            raise PreemptedError("stopped while the teacher is asked")
        return fill(self, *parts)

    def stop_at_4(self: GradCacheEngine, *parts: Any, step: Any = GradCacheEngine.step, **more: Any) -> Any:
        if steps_saved(whole.folder.parents[1] / "again/out"):
            raise PreemptedError("stopped behind the first checkpoint")
        return step(self, *parts, **more)

    monkeypatch.setattr(VectorStore, "_fill", count)
    stopped = run_keys(tmp_path / "again", taught(site))
    assert (stopped.code, steps_saved(stopped.folder)) == (75, [])
    with monkeypatch.context() as patch:
        patch.setattr(GradCacheEngine, "step", stop_at_4)
        stopped = run_keys(tmp_path / "again", taught(site))
    assert (stopped.code, steps_saved(stopped.folder)) == (75, [3])
    assert asked == ["query", "document", "document"], "what was said of the queries outlived the first stop"
    resumed = run_keys(tmp_path / "again", taught(site))
    assert resumed.code == 0, resumed.err
    assert len(asked) == 3
    assert_same_run(whole.folder, resumed.folder)


@pytest.mark.slow
def test_scores_of_a_rows_own_documents_train_a_loss_of_pairs(site: Site, tmp_path: Path) -> None:
    done = run_keys(tmp_path, taught(site) | {"loss_type": "cosine_mse"})
    assert done.code == 0, done.err
    assert done.losses[-1] < 0.8 * done.losses[0]


@pytest.mark.slow
def test_a_teacher_that_finds_false_negatives_changes_what_is_learnt_on_any_number_of_processes(
    site: Site, tmp_path: Path
) -> None:
    found = {"false_negative_filter": "teacher", "false_negative_margin": 0.3, "num_processes": 1}
    keys = taught(site) | {"loss_type": "infonce", "plugins": []} | found
    filtered = run_keys(tmp_path / "filtered", keys)
    assert filtered.code == 0, filtered.err
    two = run_process(write_config(tmp_path / "two", keys | {"num_processes": 2}))
    assert two.code == 0, two.err
    assert two.losses == pytest.approx(filtered.losses, rel=1e-4)
    for name in ("teacher_model_name", *found):
        del keys[name]
    plain = run_keys(tmp_path / "plain", keys)
    assert plain.code == 0, plain.err
    assert filtered.losses[0] < plain.losses[0], "what the teacher finds too similar is no negative"


@pytest.mark.slow
def test_a_run_whose_teacher_has_changed_is_not_resumed(site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.bert_without_dropout, tmp_path / "teacher")
    keys = taught(site) | {"teacher_model_name": str(tmp_path / "teacher"), "max_steps": 4, "save_steps": 2}
    assert run_keys(tmp_path, keys).code == 0
    folder = tmp_path / "out"
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    weights = tmp_path / "teacher" / "model.safetensors"
    changed = {name: tensor + 0.1 for name, tensor in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    refused = run_keys(tmp_path, keys)
    assert refused.code == 2
    assert "belongs to another run" in refused.err
    assert "\n  teacher.weights: " in refused.err
    assert "base" not in refused.err.partition("Resume with")[0]


def test_a_dry_run_asks_about_one_batch_and_leaves_nothing(site: Site, tmp_path: Path) -> None:
    done = run_keys(tmp_path, taught(site), "--dry-run")
    assert done.code == 0, done.err
    assert "dry run: one step of 16 queries" in done.out + done.err
    assert not done.folder.exists()


@pytest.mark.slow
def test_a_dry_run_on_two_machines_shares_answers_beside_the_output_folder(site: Site, tmp_path: Path) -> None:
    """Temporary folders are each machine's own, so what all ranks read lies where the output will, and goes again."""
    keys = {**taught(site), "loss_type": "infonce", "false_negative_filter": "teacher", "plugins": []}
    config, temporary = write_config(tmp_path / "run", keys), tmp_path / "temporary"
    temporary.mkdir()
    seen: set[Path] = set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_ranks, config, "--dry-run", machines=2, TMPDIR=str(temporary))
        while not running.done():  # about ten looks in the half second that the folder is there
            seen.update(folder.parent for folder in tmp_path.rglob(".dry-run-*"))
            time.sleep(0.02)
    done = running.result()
    assert done.code == 0, done.err
    assert "dry run: one step of 32 queries" in done.out + done.err
    assert seen == {config.parent}
    assert not list(tmp_path.rglob(".dry-run-*"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_model_name": None}, "loss_type taught reads a teacher's vectors, but there is none"),
        ({"loss_type": "kl"}, "learns nothing from rows of one document"),
        ({"loss_type": "infonce"}, "nothing reads the teacher: set false_negative_filter to teacher"),
        ({"teacher_model_name": "builtin:ngram-bag"}, "untrained and has nothing to teach"),
        ({"loss_type": "cosine_mse", "label_kind": "pair"}, "label_kind pair gives the scores already"),
        ({"teacher_model_name": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_a_teacher_that_nobody_reads_or_that_is_missing_is_refused(
    site: Site, tmp_path: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    keys = {key: value for key, value in (taught(site) | changes).items() if value is not None}
    refused = run_keys(tmp_path, keys, "--plan")
    assert refused.code in (2, 3, 5)
    assert words in refused.err
