"""`vembed push` through huggingface_hub itself, to a stand-in for the hub: what arrives and what never does."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub.constants
import numpy as np
import pytest
import yaml
from hub_cases import TOKEN, running_hub

import vembed
from vembed.entrypoints.export import main as export_main
from vembed.errors import ConfigError
from vembed.plugins.push.command import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hub_cases import Hub
    from kit.runs import Outcome, Site

    from vembed.api.keys import LoadKeys

REPO = "team/faq-search"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, where huggingface_hub looks for the hub."""
    with running_hub() as started:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", started.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_ENDPOINT", raising=False)
        yield started


@pytest.fixture(scope="module")
def exported(finished: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `vembed export` writes of the run."""
    folder = tmp_path_factory.mktemp("exported") / "faq-search"
    with contextlib.redirect_stdout(io.StringIO()):
        assert export_main([str(finished.folder), "--output", str(folder)], program="vembed export") == 0
    return folder


def push(*words: object) -> tuple[int, str, str]:
    """Run the command in this process and return exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words], program="vembed push")
    return code, out.getvalue(), err.getvalue()


def block(card: str) -> dict[str, object]:
    loaded: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return loaded


def test_a_run_arrives_byte_for_byte_with_its_numbers_and_nothing_else(
    hub: Hub, finished: Outcome, exported: Path, tmp_path: Path, site: Site
) -> None:
    code, out, err = push(finished.folder, REPO, "--message", "first", "--license", "mit", "--language", "en")
    assert code == 0, err
    assert f"{REPO} (private): {hub.url}/{REPO}/commit/1" in out
    assert (hub.private, hub.messages) == ({REPO: True}, ["first"])
    files = hub.branches[REPO, "main"]
    expected = {path.relative_to(exported).as_posix(): path for path in exported.rglob("*") if path.is_file()}
    assert files.keys() == expected.keys()
    for name, path in expected.items():
        assert name in ("README.md", "serve.md") or files[name] == path.read_bytes(), name
    assert f"vllm serve {REPO} " in files["serve.md"].decode()
    card = files["README.md"].decode()
    data = block(card)
    assert (data["license"], data["library_name"], data["pipeline_tag"]) == (
        "mit",
        "sentence-transformers",
        "sentence-similarity",
    )
    values, untrained = (
        json.loads((finished.folder / "evaluation" / name / "metrics.json").read_text())["metrics"]["ndcg@10"]
        for name in ("final", "baseline")
    )
    metric = data["model-index"][0]["results"][0]["metrics"][0]  # type: ignore[index]
    assert (metric["name"], metric["value"]) == ("nDCG@10", pytest.approx(values, abs=1e-6))
    assert metric["args"] == {"untrained": pytest.approx(untrained, abs=1e-6)}
    assert f'SentenceTransformer("{REPO}")' in card
    for leak in (str(finished.folder), str(site.train), str(Path.home()), TOKEN, "hf_canary", "/tmp/"):
        assert not any(leak.encode() in content for content in files.values()), leak
    rows = [json.loads(line) for line in site.train.read_text().splitlines()]
    texts = b"".join(content for name, content in files.items() if not name.startswith("tokenizer"))
    assert [row["positive"] for row in rows if row["positive"].encode() in texts] == []
    for name, content in files.items():
        (tmp_path / "back" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / name).write_bytes(content)
    rebuilt, model = vembed.load(tmp_path / "back"), vembed.load(finished.folder)
    query = rows[0]["query"]
    assert np.array_equal(rebuilt.encode([query], "query"), model.encode([query], "query"))


def test_a_dry_run_lists_everything_and_asks_the_hub_nothing(
    hub: Hub, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    shutil.copytree(exported, tmp_path / "mine")
    (tmp_path / "mine" / "optimizer.pt").write_bytes(b"state")
    (tmp_path / "mine" / "train.jsonl").write_text("{}")
    (tmp_path / "mine" / "checkpoint-4").mkdir()
    (tmp_path / "mine" / "checkpoint-4" / "model.safetensors").write_bytes(b"old")
    code, out, err = push(tmp_path / "mine", REPO, "--dry-run")
    assert code == 0, err
    assert hub.requests == []
    names = {line.split()[-1] for line in out.splitlines() if line.startswith(" ") and "stays here" not in line}
    assert names >= {"README.md", "model.safetensors", "1_Pooling/config.json", "modules.json", "tokenizer.json"}
    kept = {line.split()[-1] for line in out.splitlines() if "stays here" in line}
    assert kept == {"optimizer.pt", "train.jsonl", "checkpoint-4/model.safetensors"}
    assert "library_name: sentence-transformers" in out
    assert out.rstrip().endswith(f"files would go to {REPO} (private); nothing was sent")


def test_python_sends_the_same_to_a_branch_and_a_second_time_only_what_changed(hub: Hub, exported: Path) -> None:
    model = vembed.load(exported)
    pushed = model.push_to_hub(REPO, public=True, revision="trial")
    assert (pushed.private, hub.private) == (False, {REPO: False})
    assert {name: len(content) for name, content in hub.branches[REPO, "trial"].items()} == dict(pushed.files)
    assert hub.taken == 1
    model.push_to_hub(REPO, public=True)
    assert hub.taken == 1, "the weights are there"
    assert hub.branches[REPO, "main"] == hub.branches[REPO, "trial"]
    with pytest.raises(ConfigError, match="is there and public: say --public"):
        model.push_to_hub(REPO)


@pytest.mark.parametrize(
    "name", ["faq", "team/", "/faq", "a/b/c", "team/fa q", "team/-faq", "te..am/faq", "a/" + "b" * 99]
)
def test_a_malformed_name_is_refused_before_anything_is_read(hub: Hub, name: str) -> None:
    code, _, err = push("./nowhere", name)
    assert code == 2
    assert "isn't a valid name on the hub: write owner/name" in err


@pytest.mark.parametrize(
    ("refusals", "code", "words", "made"),
    [
        ({"POST /api/repos/create": 403}, 2, ("answers 403", "write access", "nothing was sent"), False),
        ({"POST /api/repos/create": 409}, 2, ("answers 409", "nothing was sent"), False),
        ({"GET /api/models": 0}, 5, ("can't be reached", "nothing was sent"), False),
        ({f"POST /api/models/{REPO}/commit": 409}, 2, ("answers 409", "push again", "isn't sent twice"), True),
        ({f"POST /api/models/{REPO}/commit": 0}, 5, ("can't be reached", "isn't sent twice"), True),
        ({"PUT /lfs": 403}, 2, ("answers 403", "isn't sent twice"), True),
    ],
)
def test_what_the_hub_refuses_is_said_with_how_far_it_came(
    hub: Hub, exported: Path, refusals: dict[str, int], code: int, words: tuple[str, ...], made: bool
) -> None:
    hub.refusals |= refusals
    found, _, err = push(exported, REPO)
    assert found == code, err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert hub.branches == {}
    assert (REPO in hub.private) == made
    hub.refusals.clear()
    assert push(exported, REPO)[0] == 0
    assert "model.safetensors" in hub.branches[REPO, "main"]


def test_without_a_token_or_with_a_wrong_one_nothing_is_sent(
    hub: Hub, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong0123456789abcdef")
    code, _, err = push(exported, REPO)
    assert code == 2
    assert "the hub doesn't know the token" in err
    assert "hf_wrong" not in err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    code, _, err = push(exported, REPO)
    assert code == 2
    assert "run hf auth login, or set HF_TOKEN" in err
    assert not hub.private


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"_name_or_path": "/scratch/anna/models/bert"}', "tells of this machine: /scratch/anna"),
        ("README.md", "---\ntags: [vembed]\n---\nread from /home/anna/rows.jsonl", "tells of this machine: /home/anna"),
        (
            "README.md",
            "---\ntags: [vembed]\n---\nAuthorization: Bearer hf_abcdefghijkl0123456789",
            "a password or a token",
        ),
    ],
)
def test_a_path_or_a_secret_keeps_the_folder_here(
    hub: Hub, exported: Path, tmp_path: Path, file: str, text: str, message: str
) -> None:
    shutil.copytree(exported, tmp_path / "mine")
    (tmp_path / "mine" / file).write_text(text)
    code, _, err = push(tmp_path / "mine", REPO)
    assert code == 2
    assert message in err
    assert "Nothing was sent" in err
    assert hub.requests == []


PRIVATE = "AKIAIOSFODNN7EXAMPLE"


@pytest.mark.parametrize("file", ["vocab.txt", "vocab.json", "merges.txt", "tokenizer.json", "1_Pooling/config.json"])
def test_a_token_in_any_text_file_keeps_the_folder_here(hub: Hub, exported: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(exported, tmp_path / "mine")
    path = tmp_path / "mine" / file
    path.write_text((path.read_text("utf-8") if path.exists() else "password= abc\n/home\n") + f" {PRIVATE}\n", "utf-8")
    code, _, err = push(tmp_path / "mine", REPO)
    assert code == 2
    assert f"{file} holds what looks like a password or a token" in err
    assert hub.requests == []
    path.write_text(path.read_text("utf-8").replace(PRIVATE, ""), "utf-8")
    code, _, err = push(tmp_path / "mine", REPO)
    assert code == 0, err


@pytest.mark.parametrize("has_card", [True, False])
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "1_Pooling", "onnx/model.onnx"])
def test_a_link_in_the_place_of_a_model_file_is_refused(
    hub: Hub, exported: Path, tmp_path: Path, name: str, has_card: bool
) -> None:
    mine, outside = tmp_path / "mine", tmp_path / "outside"
    shutil.copytree(exported, mine)
    if not has_card:  # the model would be exported anew, by libraries that follow links
        (mine / "README.md").unlink()
    (mine / name).parent.mkdir(exist_ok=True)
    if (mine / name).exists():
        shutil.move(mine / name, outside)
    else:
        outside.write_text("root:x:0:0\n")
    (mine / name).symlink_to(outside)
    for words in ((mine, REPO), (mine, REPO, "--dry-run")):
        code, out, err = push(*words)
        assert (code, out) == (2, "")
        assert f"{mine / name} is a link to {outside}: put the file itself in its place" in err
    assert hub.requests == []


def test_links_of_a_hub_cache_are_followed_and_what_arrives_is_what_the_dry_run_listed(
    hub: Hub, exported: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--team--old"
    snapshot, blobs = cache / "snapshots" / ("a" * 40), cache / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in exported.rglob("*") if path.is_file())):
        name = path.relative_to(exported)
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(Path(*[".."] * (len(name.parts) + 1), "blobs", f"{number:040x}"))
    weights = (exported / "model.safetensors").read_bytes()
    unsent = ("model_optimizer.safetensors", "optimizer.safetensors", "model-00001.safetensors", "customers.model")
    for name in unsent:
        (snapshot / name).write_bytes(weights)
    (snapshot / "notes.txt").symlink_to("/etc/hostname")  # no file of a model
    code, out, err = push(snapshot, REPO, "--dry-run")
    assert code == 0, err
    lines = [line.split() for line in out.partition("\n\n")[0].splitlines()]
    listed = {words[-1] for words in lines if words[0] != "stays"}
    assert {words[-1] for words in lines if words[0] == "stays"} == {*unsent, "notes.txt"}
    assert push(snapshot, REPO)[0] == 0
    arrived = hub.branches[REPO, "main"]
    assert arrived.keys() == listed
    assert {name: (exported / name).read_bytes() for name in listed} == arrived


def test_files_that_the_repository_ignores_are_told(hub: Hub, exported: Path) -> None:
    hub.ignored.add("tokenizer.json")
    code, out, err = push(exported, REPO)
    assert (code, out) == (2, "")
    assert "the hub took the other files and left out tokenizer.json: the repository's .gitignore" in err
    hub.ignored.clear()
    assert push(exported, REPO)[0] == 0
    assert "tokenizer.json" in hub.branches[REPO, "main"]


@pytest.mark.parametrize("tags", ["[sentence-transformers, generated_from_trainer]", "[", "vembed-like"])
def test_a_card_of_another_tool_stays_here_and_the_model_gets_one_of_its_own(
    hub: Hub, exported: Path, tmp_path: Path, tags: str
) -> None:
    shutil.copytree(exported, tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text(f"---\ntags: {tags}\n---\n| a row of the training data |\n")
    code, _, err = push(tmp_path / "mine", REPO)
    assert code == 0, err
    card = hub.branches[REPO, "main"]["README.md"].decode()
    assert "a row of the training data" not in card
    assert "vembed" in block(card)["tags"]  # type: ignore[operator]


def test_only_folders_that_a_model_names_are_looked_into(hub: Hub, exported: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(exported, mine)
    private = [
        "scripts/make_rows.py",
        "data/README.md",
        "labels/config_customers.json",
        "wandb/run-1/files/config.json",
    ]
    private += [
        "make_rows.py",
        "config_customers.json",
        "wandb-config.json",
        "1_Pooling/README.md",
        "onnx/notes/config.json",
    ]
    model = [
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "onnx/model_quantized.onnx.data",
        "modeling_mine.py",
        "parts.py",
    ]
    for name in (*private, *model):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("{}")
    (mine / "modeling_mine.py").write_text("from .parts import Part\n")
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_mine.MyModel"}}))
    code, out, err = push(mine, REPO, "--dry-run")
    assert code == 0, err
    kept = {line.split()[-1] for line in out.splitlines() if "stays here" in line}
    assert kept == set(private)
    assert {line.split()[-1] for line in out.splitlines() if line.startswith(" ")} >= {*model, "1_Pooling/config.json"}


def test_what_a_model_was_loaded_with_is_published_or_refused(hub: Hub, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "raw")
    options: LoadKeys = {"pooling_method": "cls", "query_prompt": "q: ", "max_seq_length": 12}
    with pytest.raises(
        ConfigError, match="without max_seq_length, pooling_method, query_prompt: load the model without"
    ):
        vembed.load(tmp_path / "raw", **options).push_to_hub(REPO)
    assert hub.requests == []
    (tmp_path / "raw" / "README.md").unlink()
    model = vembed.load(tmp_path / "raw", **options)
    model.push_to_hub(REPO)
    for name, content in hub.branches[REPO, "main"].items():
        (tmp_path / "back" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / name).write_bytes(content)
    texts = ["a red fox", "word " * 20]
    found = vembed.load(tmp_path / "back").encode(texts, "query")
    assert np.array_equal(found, model.encode(texts, "query"))
    assert not np.allclose(found, vembed.load(exported).encode(texts, "query"))
