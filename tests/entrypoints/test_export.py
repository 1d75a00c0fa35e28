"""`vembed export`: from a run, one of its checkpoints or a model to a folder with a card whose examples run."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import yaml
from kit.picture_models import write_open_clip, write_picture_model
from kit.runs import environment, run_keys, steps_saved
from safetensors.torch import load_file, save_file

import vembed.evaluation.card
from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import whole
from vembed.entrypoints.export import ExportOptions
from vembed.entrypoints.options import check, parse_words
from vembed.models.export import TOLERANCE
from vembed.models.exportable import sample_pngs
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.registry import COMMANDS

if TYPE_CHECKING:
    from kit.runs import Outcome, Site

CANARY = "hf_canary0123456789secret"


def section(card: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"no section {title}"
    return found.group(1)


def programs(card: str) -> dict[str, str]:
    """Return the example of each library."""
    return dict(re.findall(r"^### ([\w-]+)\n\n[^\n]*\n\n```python\n(.*?)^```$", card, flags=re.DOTALL | re.MULTILINE))


def block(card: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return loaded


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to export into and to run examples in, with the pictures that they open."""
    for name, data in zip(("picture.jpg", "other.jpg"), sample_pngs(), strict=False):
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(program: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed, torch.no_grad():
        exec(compile(program, "example", "exec"), found)
    assert printed.getvalue().strip()
    return found


def assert_examples_agree(card: str, libraries: set[str]) -> None:
    """Run every example of a card: all must give the same vectors, and say that they compare by them."""
    written = programs(card)
    assert set(written) == libraries
    results = {library: run_example(program) for library, program in written.items()}
    for side in ("queries", "documents"):
        rows = {library: np.asarray(found[side], dtype=np.float64) for library, found in results.items()}
        for library, vectors in rows.items():
            assert np.abs(vectors - rows["vembed"]).max() <= TOLERANCE, (library, side)
            assert np.isfinite(vectors).all()
    for library, found in results.items():
        expected = np.asarray(results["vembed"]["queries"]) @ np.asarray(results["vembed"]["documents"]).T
        assert np.abs(np.asarray(found["scores"]) - expected).max() <= 10 * TOLERANCE, library


def test_a_run_is_exported_with_the_numbers_of_its_evaluation(call: Any, finished: Outcome, in_folder: Path) -> None:
    words = ("--output", "mine", "--license", "MIT License", "--language", "en")
    out = call("export", finished.folder, *words).ok().out
    assert "read back by vembed" in out
    assert re.search(r"8 sample items, largest difference [\d.e-]+$", out, flags=re.MULTILINE)
    assert out.rstrip().endswith("sentence-transformers folder, float32 weights: mine")
    card = Path("mine/README.md").read_text("utf-8")
    data = block(card)
    assert (data["license"], data["language"], data["library_name"]) == ("mit", ["en"], "sentence-transformers")
    value = finished.json("evaluation/final/metrics.json")["metrics"]["ndcg@10"]
    (name, results) = data["model-index"][0].values()
    assert name == "mine"
    found = {metric["name"]: metric["value"] for metric in results[0]["metrics"]}
    assert found["nDCG@10"] == pytest.approx(value, abs=1e-6)
    assert f"{value:.3f}" in section(card, "Results")
    assert finished.last_line in section(card, "Results")
    assert "| training records | 84 |" in section(card, "Training")
    assert_examples_agree(card, {"sentence-transformers", "transformers", "vembed"})


def test_the_run_itself_has_the_same_card(call: Any, finished: Outcome, in_folder: Path) -> None:
    own = finished.text("model/README.md")
    call("export", finished.folder / "model", "--output", "mine").ok()
    exported = Path("mine/README.md").read_text("utf-8")
    for title in ("Model", "Training", "Results", "Limits", "Licences", "Environment", "Citation"):
        assert section(own, title) == section(exported, title)
    assert block(own) == {**block(exported), "model-index": block(own)["model-index"]}
    assert own.count("# out") == 1
    shutil.copytree(finished.folder / "model", in_folder / "model")
    assert_examples_agree(own, {"sentence-transformers", "transformers", "vembed"})


def test_no_path_user_secret_or_markup_is_on_a_card(call: Any, finished: Outcome, in_folder: Path) -> None:
    licence = ("--license", "https://me:pw@example.org/terms?token=abc")
    call("export", finished.folder, "--output", "mine", *licence).ok()
    for card in (Path("mine/README.md"), finished.folder / "model" / "README.md"):
        text = card.read_text("utf-8")
        for leak in (CANARY, str(finished.folder.parent), str(Path.home()), "/tmp/", "me:pw", "token=abc"):
            assert leak not in text, leak
        assert "train.jsonl" in text
    shutil.copytree(finished.folder, "run")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    config["data_path"] = "https://me:pw@example.org/</script>\n---\n/rows.jsonl?api_key=abc"
    config["scheduler_type"] = "--- </script> https://me:pw@example.org/x?token=abc"
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    call("export", "run", "--output", "edited").ok()
    text = Path("edited/README.md").read_text("utf-8")
    assert not any(leak in text for leak in ("me:pw", "abc", "</script"))
    assert text.count("\n---\n") == 1


def test_a_run_whose_files_are_broken_still_exports_its_model(call: Any, finished: Outcome, in_folder: Path) -> None:
    shutil.copytree(finished.folder, "run")
    Path("run/config.yaml").write_text("a: [")
    done = call("export", "run", "--output", "mine").ok()
    assert (done.err, "warning: the card tells nothing of the run" in done.out) == ("", True)
    assert "Its training is not known here." in Path("mine/README.md").read_text()
    Path("run/config.yaml").unlink()
    call("export", "run", "--output", "mine", "--overwrite").ok()


def test_a_run_that_has_not_finished_says_so(call: Any, finished: Outcome, in_folder: Path) -> None:
    shutil.copytree(finished.folder, "run", ignore=shutil.ignore_patterns("model", "final", "report"))
    refusal = "is a run that has not finished: it has no model/ yet. Resume it first"
    call("export", "run", "--output", "mine").fails(2, refusal)
    assert not Path("mine").exists()
    shutil.copytree(finished.folder / "model", "run/model")
    call("export", "run", "--output", "mine").ok()
    card = Path("mine/README.md").read_text()
    assert "nothing was measured of this model" in section(card, "Results")
    assert "| learning_rate | 0.003 |" in section(card, "Training")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["builtin:ngram-bag"], "to be trained from scratch; train it, then name the output folder of the run"),
        (["example/model", "--trust-remote-code"], "needs --model-revision"),
        (["MODEL", "--format", "open_clip"], "write --format sentence-transformers"),
        (["MODEL", "--language", "english"], "'english' is no code"),
        (["MODEL", "--license", " "], "--license is empty"),
        (["RUN", "--checkpoint", "3"], "has no checkpoint of step 3; it has: 8, 16"),
        (["MODEL", "--checkpoint", "16"], "has no checkpoints; name the output folder of a run"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    call: Any, site: Site, finished: Outcome, in_folder: Path, words: list[str], message: str
) -> None:
    names = {"MODEL": site.bert, "RUN": finished.folder}
    call("export", *(names.get(word, word) for word in words), "--output", "mine").fails(2, message)
    assert sorted(path.name for path in in_folder.iterdir()) == ["other.jpg", "picture.jpg"]


def test_a_bare_model_gets_a_card_of_what_is_known(call: Any, site: Site, in_folder: Path) -> None:
    words = ("--output", "mine", "--format", "transformers", "--dtype", "bfloat16")
    out = call("export", site.bert, *words).ok().out
    assert "rounding the weights to bfloat16 moved vectors by up to" in out
    assert "the card states no licence; --license ID does" in out
    card = Path("mine/README.md").read_text("utf-8")
    assert "Its training is not known here." in card
    assert "| Weights | bfloat16 |" in card
    assert not block(card).keys() & {"license", "base_model", "model-index"}
    assert set(programs(card)) == {"transformers", "vembed"}


def test_licences_are_told_and_a_full_folder_is_kept_unless_asked(call: Any, site: Site, in_folder: Path) -> None:
    words = ("export", site.bert, "--output", "mine")
    out = call(*words, "--license", "apache-3.0", "--base-model-license", "mit").ok().out
    assert "none of the hub's ids (did you mean apache-2.0?)" in out
    card = Path("mine/README.md").read_text()
    assert "| The model before it | mit |" in section(card, "Licences")
    assert block(card)["license"] == "other"
    call(*words).fails(2, "--overwrite")
    assert Path("mine/README.md").read_text() == card
    call(*words, "--overwrite").ok()
    assert "license" not in block(Path("mine/README.md").read_text())


@pytest.mark.slow
def test_what_was_trained_from_scratch_has_no_licence_before_it(call: Any, site: Site, in_folder: Path) -> None:
    run_keys(
        in_folder, site.keys(model_name="builtin:ngram-bag", max_steps=1, eval_strategy="no", eval_steps=None)
    ).ok()
    call("export", "out", "--output", "mine", "--base-model-license", "mit").fails(2, "trained from scratch")
    out = call("export", "out", "--output", "mine").ok().out
    assert out.rstrip().endswith("vembed folder, float32 weights: mine")
    card = Path("mine/README.md").read_text()
    assert "Trained from scratch (builtin:ngram-bag) with vembed." in card
    assert "model before it" not in section(card, "Licences")
    assert_examples_agree(card, {"vembed"})


@pytest.mark.parametrize("error", [RuntimeError("no card today"), OSError(errno.ENOSPC, "no card today")])
def test_a_card_that_fails_never_loses_the_model(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(facts: object) -> str:
        raise error

    monkeypatch.setattr(vembed.evaluation.card, "render_card", failing)
    done = run_keys(tmp_path, site.keys(max_steps=1, eval_strategy="no", eval_steps=None)).ok()
    assert "the model card could not be written; the model is complete" in done.err
    log = done.text("train.log")
    assert "no card today" in log
    assert ("Traceback" in log) == isinstance(error, RuntimeError), "a full disk is no bug"
    assert not (done.folder / "model" / "README.md").exists()
    load_encoder(ModelKeys(model_name=str(done.folder / "model")))


def write_form(kind: str, folder: Path) -> Path:
    if kind == "open_clip":
        return write_open_clip(folder)
    if kind == "tiny-clip":
        TinyClip(TinyClipConfig(dimension=16)).save(folder)
        return folder
    return write_picture_model(folder, kind)


@pytest.mark.parametrize(
    ("kind", "form", "libraries", "tag"),
    [
        ("clip", "sentence-transformers", {"sentence-transformers", "transformers"}, "sentence-similarity"),
        ("siglip", "transformers", {"transformers"}, "zero-shot-image-classification"),
        ("siglip2", "sentence-transformers", {"sentence-transformers", "transformers"}, "sentence-similarity"),
        ("vit", "sentence-transformers", {"sentence-transformers", "transformers"}, "image-feature-extraction"),
        ("dinov2", "transformers", {"transformers"}, "image-feature-extraction"),
        ("open_clip", "auto", {"open_clip"}, "zero-shot-image-classification"),
        ("tiny-clip", "auto", set(), "zero-shot-image-classification"),
    ],
)
def test_the_examples_of_every_form_give_the_models_vectors(
    call: Any, tmp_path_factory: pytest.TempPathFactory, in_folder: Path, kind: str, form: str, libraries: set[str],
    tag: str,
) -> None:  # fmt: skip
    model = write_form(kind, tmp_path_factory.mktemp("model") / kind)
    call("export", model, "--output", "mine", "--format", form).ok()
    card = Path("mine/README.md").read_text("utf-8")
    assert block(card)["pipeline_tag"] == tag
    assert_examples_agree(card, libraries | {"vembed"})


HELD = """
import sys
from vembed.entrypoints import export
from vembed.models import export as write
written = write.write_form
def held(encoder, form, folder):
    written(encoder, form, folder)
    print("written", flush=True)
    sys.stdin.readline()
write.write_form = held
sys.exit(export.main(sys.argv[1:], program="vembed export"))
"""
"""An export that waits for a line behind the write of its model."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_export_leaves_no_model(call: Any, site: Site, in_folder: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, str(site.bert), "--output", "mine"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "written\n":
        assert line, process.communicate()[1]
    process.send_signal(number)
    _, err = process.communicate("\n", timeout=60)
    assert not Path("mine").exists()
    if number == signal.SIGTERM:
        assert (process.returncode, "stopped by SIGTERM; nothing was written" in err) == (75, True)
    else:
        deadline = time.monotonic() + 10
        while not Path(".mine.tmp").is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert Path(".mine.tmp").is_dir()
        call("export", site.bert, "--output", "mine").ok()
        shutil.rmtree("mine")
    assert {path.name for path in in_folder.iterdir()} == {"other.jpg", "picture.jpg"}, "nothing is left beside it"


def test_the_command_is_listed_and_its_help_names_every_form() -> None:
    assert "export" in COMMANDS
    done = subprocess.run(
        [sys.executable, "-m", "vembed", "export", "--help"], capture_output=True, text=True, env=environment(),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0
    for word in ("sentence-transformers", "transformers", "open_clip", "--license", "--dtype", "--overwrite"):
        assert word in done.stdout
    words = ["run", "--output", "mine"]
    options = check(ExportOptions, parse_words(ExportOptions, words, program="vembed export"))
    assert (options.format, options.dtype, options.license, options.overwrite) == ("auto", None, None, False)


# Checkpoints of runs, whether or not they have ended


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_checkpoint_of_a_run_that_has_not_ended_becomes_a_model(call: Any, finished: Outcome, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "checkpoints", tmp_path / "run/checkpoints")
    newest = steps_saved(finished.folder)[-1]
    out = call("export", tmp_path / "run", "--checkpoint", newest, "--output", tmp_path / "model").ok().out
    assert "read back by vembed" in out
    assert f"not of step {newest}" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"], "nothing stays beside it"
    loaded = CheckpointManager(tmp_path / "run/checkpoints").load("auto")
    assert loaded is not None
    assert loaded.step == newest
    saved, exported = loaded.tensors["model"], weights(tmp_path / "model")
    assert exported
    assert all(torch.equal(whole(saved[f"backbone.{name}"]), tensor) for name, tensor in exported.items())


def test_a_disk_that_refuses_the_model_of_a_checkpoint_costs_one_line_and_leaves_nothing(
    call: Any, finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def full(path: Path, *words: Any, **options: Any) -> int:
        if ".model.checkpoint" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *words, **options)

    monkeypatch.setattr(Path, "write_text", full)
    newest = steps_saved(finished.folder)[-1]
    refusal = f"the model of step {newest} can't be written: [Errno 28] No space left on device"
    call("export", finished.folder, "--checkpoint", newest, "--output", tmp_path / "model").fails(5, refusal)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_adapters_are_merged_into_the_model_beside_them(call: Any, site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.bert, tmp_path / "bert")
    keys = {"model_name": str(tmp_path / "bert"), "use_lora": True, "lora_r": 4, "learning_rate": 1e-2, "max_steps": 4,
            "eval_strategy": "no", "eval_steps": None, "val_data_path": None}  # fmt: skip
    run = run_keys(tmp_path / "lora", site.keys(**keys)).ok()
    call("export", run.folder, "--checkpoint", "4", "--output", tmp_path / "model").ok()
    kept, exported = weights(run.folder / "model"), weights(tmp_path / "model")
    assert kept.keys() == exported.keys()
    assert all(torch.equal(kept[name], exported[name]) for name in kept)
    base = weights(tmp_path / "bert")
    assert any(not torch.equal(base[name], exported[name]) for name in base)
    changed = {name: tensor + 1 for name, tensor in base.items()}
    save_file(changed, tmp_path / "bert/model.safetensors", {"format": "pt"})
    words = (run.folder, "--checkpoint", "4", "--output", tmp_path / "other")
    call("export", *words).fails(2, "is no longer the model that it was trained beside")
