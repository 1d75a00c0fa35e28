"""`vembed export`: from a run or a model to a folder with a card whose examples run."""

from __future__ import annotations

import contextlib
import errno
import io
import json
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
from kit.runs import ROOT, environment, run_keys

import vembed.training.card
from vembed.entrypoints.export import ExportOptions, main
from vembed.entrypoints.options import check, parse_words
from vembed.models.export import TOLERANCE
from vembed.models.exportable import sample_pngs
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.registry import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.runs import Outcome, Site

CANARY = "hf_canary0123456789secret"


def export(*words: str | Path) -> tuple[int, str, str]:
    """Run the command in this process and return exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words], program="vembed export")
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


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


def test_a_run_is_exported_with_the_numbers_of_its_evaluation(finished: Outcome, in_folder: Path) -> None:
    code, out, err = export(finished.folder, "--output", "mine", "--license", "MIT License", "--language", "en")
    assert code == 0, err
    assert "read back by vembed" in out
    assert re.search(r"8 sample items, largest difference [\d.e-]+$", out, flags=re.MULTILINE)
    assert out.rstrip().endswith("sentence-transformers folder, float32 weights: mine")
    card = Path("mine/README.md").read_text("utf-8")
    data = block(card)
    assert (data["license"], data["language"], data["library_name"]) == ("mit", ["en"], "sentence-transformers")
    values = json.loads((finished.folder / "evaluation" / "final" / "metrics.json").read_text())["metrics"]
    (name, results) = data["model-index"][0].values()
    assert name == "mine"
    found = {metric["name"]: metric["value"] for metric in results[0]["metrics"]}
    assert found["nDCG@10"] == pytest.approx(values["ndcg@10"], abs=1e-6)
    assert f"{values['ndcg@10']:.3f}" in section(card, "Results")
    assert finished.last_line in section(card, "Results")
    assert "| training records | 84 |" in section(card, "Training")
    assert_examples_agree(card, {"sentence-transformers", "transformers", "vembed"})


def test_the_run_itself_has_the_same_card(finished: Outcome, in_folder: Path) -> None:
    own = (finished.folder / "model" / "README.md").read_text("utf-8")
    assert export(finished.folder / "model", "--output", "mine")[0] == 0
    exported = Path("mine/README.md").read_text("utf-8")
    for title in ("Model", "Training", "Results", "Limits", "Licences", "Environment", "Citation"):
        assert section(own, title) == section(exported, title)
    assert block(own) == {**block(exported), "model-index": block(own)["model-index"]}
    assert own.count("# out") == 1
    shutil.copytree(finished.folder / "model", in_folder / "model")
    assert_examples_agree(own, {"sentence-transformers", "transformers", "vembed"})


def test_no_path_user_or_secret_is_on_a_card(finished: Outcome, in_folder: Path) -> None:
    assert export(finished.folder, "--output", "mine", "--license", "https://me:pw@example.org/terms?token=abc")[0] == 0
    for card in (Path("mine/README.md"), finished.folder / "model" / "README.md"):
        text = card.read_text("utf-8")
        for leak in (CANARY, str(finished.folder.parent), str(Path.home()), "/tmp/", "me:pw", "token=abc"):
            assert leak not in text, leak
        assert "train.jsonl" in text


def test_secrets_and_markup_in_an_edited_run_stay_harmless(finished: Outcome, in_folder: Path) -> None:
    shutil.copytree(finished.folder, "run")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    config["data_path"] = "https://me:pw@example.org/</script>\n---\n/rows.jsonl?api_key=abc"
    config["scheduler_type"] = "--- </script> https://me:pw@example.org/x?token=abc"
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = export("run", "--output", "mine")
    assert code == 0, err
    text = Path("mine/README.md").read_text("utf-8")
    assert not any(leak in text for leak in ("me:pw", "abc", "</script"))
    assert text.count("\n---\n") == 1


def test_a_run_whose_files_are_broken_still_exports_its_model(finished: Outcome, in_folder: Path) -> None:
    shutil.copytree(finished.folder, "run")
    Path("run/config.yaml").write_text("a: [")
    code, out, err = export("run", "--output", "mine")
    assert (code, err) == (0, "")
    assert "warning: the card tells nothing of the run" in out
    assert "Its training is not known here." in Path("mine/README.md").read_text()
    Path("run/config.yaml").unlink()
    assert export("run", "--output", "mine", "--overwrite")[0] == 0


def test_a_run_that_has_not_finished_says_so(finished: Outcome, in_folder: Path) -> None:
    shutil.copytree(finished.folder, "run", ignore=shutil.ignore_patterns("model", "final", "report"))
    code, _, err = export("run", "--output", "mine")
    assert code == 2
    assert "is a run that has not finished: it has no model/ yet. Resume it first" in err
    assert not Path("mine").exists()
    shutil.copytree(finished.folder / "model", "run/model")
    assert export("run", "--output", "mine")[0] == 0
    card = Path("mine/README.md").read_text()
    assert "nothing was measured of this model" in section(card, "Results")
    assert "| learning_rate | 0.003 |" in section(card, "Training")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["builtin:ngram-bag"], "to be trained from scratch; train it, then name the output folder of the run"),
        (["./nowhere"], "there is no folder ./nowhere"),
        (["example/model", "--trust-remote-code"], "needs --model-revision"),
        (["MODEL", "--format", "open_clip"], "write --format sentence-transformers"),
        (["MODEL", "--language", "english"], "'english' is no code"),
        (["MODEL", "--license", " "], "--license is empty"),
    ],
)
def test_what_cannot_be_exported_is_refused(site: Site, in_folder: Path, words: list[str], message: str) -> None:
    given = [str(site.bert) if word == "MODEL" else word for word in words]
    code, _, err = export(*given, "--output", "mine")
    assert code == 2
    assert message in err
    assert sorted(path.name for path in in_folder.iterdir()) == ["other.jpg", "picture.jpg"]


def test_a_bare_model_gets_a_card_of_what_is_known(site: Site, in_folder: Path) -> None:
    code, out, err = export(site.bert, "--output", "mine", "--format", "transformers", "--dtype", "bfloat16")
    assert code == 0, err
    assert "rounding the weights to bfloat16 moved vectors by up to" in out
    assert "the card states no licence; --license ID does" in out
    card = Path("mine/README.md").read_text("utf-8")
    assert "Its training is not known here." in card
    assert "| Weights | bfloat16 |" in card
    assert not block(card).keys() & {"license", "base_model", "model-index"}
    assert set(programs(card)) == {"transformers", "vembed"}


def test_a_full_folder_is_kept_unless_overwriting_is_asked_for(site: Site, in_folder: Path) -> None:
    assert export(site.bert, "--output", "mine", "--license", "mit")[0] == 0
    code, _, err = export(site.bert, "--output", "mine")
    assert code == 2
    assert "--overwrite" in err
    assert block(Path("mine/README.md").read_text())["license"] == "mit"
    assert export(site.bert, "--output", "mine", "--overwrite")[0] == 0
    assert "license" not in block(Path("mine/README.md").read_text())


def test_a_licence_that_the_hub_does_not_know_is_said(site: Site, in_folder: Path) -> None:
    code, out, _ = export(site.bert, "--output", "mine", "--license", "apache-3.0", "--base-model-license", "mit")
    assert code == 0
    assert "none of the hub's ids (did you mean apache-2.0?)" in out
    card = Path("mine/README.md").read_text()
    assert "| The model before it | mit |" in section(card, "Licences")
    assert block(card)["license"] == "other"


@pytest.mark.slow
def test_what_was_trained_from_scratch_has_no_licence_before_it(site: Site, in_folder: Path) -> None:
    keys = site.keys(model_name="builtin:ngram-bag", max_steps=1, eval_strategy="no", eval_steps=None)
    assert run_keys(in_folder, keys).code == 0
    code, _, err = export("out", "--output", "mine", "--base-model-license", "mit")
    assert code == 2
    assert "trained from scratch" in err
    code, out, err = export("out", "--output", "mine")
    assert code == 0, err
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

    monkeypatch.setattr(vembed.training.card, "render_card", failing)
    done = run_keys(tmp_path, site.keys(max_steps=1, eval_strategy="no", eval_steps=None))
    assert done.code == 0, done.err
    assert "the model card could not be written; the model is complete" in done.err
    log = (done.folder / "train.log").read_text()
    assert "no card today" in log
    assert ("Traceback" in log) == isinstance(error, RuntimeError), "a full disk is no bug"
    assert not (done.folder / "model" / "README.md").exists()
    load_encoder(ModelKeys(model_name=str(done.folder / "model")))


@pytest.fixture(scope="module")
def picture_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    sys.path.insert(0, str(ROOT / "tests" / "models"))
    try:
        from kit.picture_models import write_picture_model
        from test_picture_encoders import write_open_clip

        from vembed.models.from_scratch import TinyClip, TinyClipConfig

        root = tmp_path_factory.mktemp("pictures")
        made = {kind: write_picture_model(root / kind, kind) for kind in ("clip", "siglip", "siglip2", "vit", "dinov2")}
        TinyClip(TinyClipConfig(dimension=16)).save(root / "tiny-clip")
        write_open_clip(root / "open_clip")
        yield made | {"tiny-clip": root / "tiny-clip", "open_clip": root / "open_clip"}
    finally:
        sys.path.remove(str(ROOT / "tests" / "models"))


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
    picture_models: dict[str, Path], in_folder: Path, kind: str, form: str, libraries: set[str], tag: str
) -> None:
    code, _, err = export(picture_models[kind], "--output", "mine", "--format", form)
    assert code == 0, err
    card = Path("mine/README.md").read_text("utf-8")
    assert block(card)["pipeline_tag"] == tag
    assert_examples_agree(card, libraries | {"vembed"})


@pytest.mark.slow
def test_a_stopped_export_leaves_nothing(site: Site, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from vembed.entrypoints import export\n"
        "from vembed.models import export as write\n"
        "written = write.write_form\n"
        "def stopped(encoder, form, folder):\n"
        "    written(encoder, form, folder)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "write.write_form = stopped\n"
        "sys.exit(export.main(sys.argv[1:], program='vembed export'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(site.bert), "--output", str(tmp_path / "mine")],
        capture_output=True, text=True, env=environment(), timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert "stopped by SIGTERM; nothing was written" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_export_is_no_model_and_the_next_one_clears_up(site: Site, in_folder: Path) -> None:
    program = (
        "import sys, time\n"
        "from vembed.entrypoints import export\n"
        "from vembed.models import export as write\n"
        "written = write.write_form\n"
        "def slow(encoder, form, folder):\n"
        "    written(encoder, form, folder)\n"
        "    print('written', flush=True)\n"
        "    time.sleep(600)\n"
        "write.write_form = slow\n"
        "export.main(sys.argv[1:], program='vembed export')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(site.bert), "--output", "mine"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while not Path(".mine.tmp").is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert Path(".mine.tmp").is_dir()
    assert not Path("mine").exists()
    assert export(site.bert, "--output", "mine")[0] == 0
    assert {path.name for path in in_folder.iterdir()} == {"mine", "other.jpg", "picture.jpg"}


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
