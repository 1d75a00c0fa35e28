"""`vembed push` through huggingface_hub itself, to a stand-in for the hub: what arrives and what never does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import numpy as np
import pytest
import yaml
from hub_cases import TOKEN, running_hub
from kit.runs import evaluation

import vembed
from vembed.entrypoints.export import main as export_main
from vembed.errors import ConfigError, ExitCode

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
    assert export_main([str(finished.folder), "--output", str(folder)], program="vembed export") == 0
    return folder


@pytest.fixture
def push(call: Any) -> Any:
    """Call the command: push(FOLDER, ...)."""
    return lambda *words: call("push", *words)


def block(card: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return loaded


def write_back(files: dict[str, bytes], folder: Path) -> Path:
    """Write what arrived at the hub."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def mine(exported: Path, tmp_path: Path) -> Path:
    """A copy of what was exported, to be changed."""
    shutil.copytree(exported, tmp_path / "mine")
    return tmp_path / "mine"


def test_a_run_arrives_byte_for_byte_with_its_numbers_and_nothing_else(
    push: Any, hub: Hub, finished: Outcome, exported: Path, tmp_path: Path, site: Site
) -> None:
    words = ("--message", "first", "--license", "mit", "--language", "en")
    assert f"{REPO} (private): {hub.url}/{REPO}/commit/1" in push(finished.folder, REPO, *words).ok().out
    assert (hub.private, hub.messages) == ({REPO: True}, ["first"])
    files = hub.branches[REPO, "main"]
    expected = {path.relative_to(exported).as_posix(): path for path in exported.rglob("*") if path.is_file()}
    assert files.keys() == expected.keys()
    for name, path in expected.items():
        assert name in ("README.md", "serve.md") or files[name] == path.read_bytes(), name
    assert f"vllm serve {REPO} " in files["serve.md"].decode()
    card = files["README.md"].decode()
    data = block(card)
    assert (data["license"], data["library_name"]) == ("mit", "sentence-transformers")
    assert data["pipeline_tag"] == "sentence-similarity"
    final, untrained = (evaluation(finished.folder, name)["metrics"]["ndcg@10"] for name in ("final", "baseline"))
    metric = data["model-index"][0]["results"][0]["metrics"][0]
    assert (metric["name"], metric["value"]) == ("nDCG@10", pytest.approx(final, abs=1e-6))
    assert metric["args"] == {"untrained": pytest.approx(untrained, abs=1e-6)}
    assert f'SentenceTransformer("{REPO}")' in card
    for leak in (str(finished.folder), str(site.train), str(Path.home()), TOKEN, "hf_canary", "/tmp/"):
        assert not any(leak.encode() in content for content in files.values()), leak
    rows = [json.loads(line) for line in site.train.read_text().splitlines()]
    texts = b"".join(content for name, content in files.items() if not name.startswith("tokenizer"))
    assert [row["positive"] for row in rows if row["positive"].encode() in texts] == []
    rebuilt, model = vembed.load(write_back(files, tmp_path)), vembed.load(finished.folder)
    query = [rows[0]["query"]]
    assert np.array_equal(rebuilt.encode(query, "query"), model.encode(query, "query"))


def test_a_dry_run_lists_what_a_model_names(push: Any, hub: Hub, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    private = {
        "optimizer.pt", "train.jsonl", "checkpoint-4/model.safetensors", "scripts/make_rows.py", "data/README.md",
        "labels/config_customers.json", "wandb/run-1/files/config.json", "make_rows.py", "config_customers.json",
        "wandb-config.json", "1_Pooling/README.md", "onnx/notes/config.json",
    }  # fmt: skip
    model = {
        "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_quantized.onnx.data", "modeling_mine.py", "parts.py",
    }  # fmt: skip
    for name in private | model:
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("{}")
    (mine / "modeling_mine.py").write_text("from .parts import Part\n")
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_mine.MyModel"}}))
    out = push(mine, REPO, "--dry-run").ok().out
    assert hub.requests == []
    lines = [line for line in out.splitlines() if line.startswith(" ")]
    assert {line.split()[-1] for line in out.splitlines() if "stays here" in line} == private
    sent = {line.split()[-1] for line in lines if "stays here" not in line}
    assert sent >= model | {
        "README.md",
        "model.safetensors",
        "1_Pooling/config.json",
        "modules.json",
        "tokenizer.json",
    }
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
def test_a_malformed_name_is_refused_before_anything_is_read(push: Any, hub: Hub, name: str) -> None:
    push("./nowhere", name).fails(2, "isn't a valid name on the hub: write owner/name")


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
    push: Any, hub: Hub, exported: Path, refusals: dict[str, int], code: int, words: tuple[str, ...], made: bool
) -> None:
    hub.refusals |= refusals
    assert push(exported, REPO).fails(code, *words).err.count("\n") == 1
    assert hub.branches == {}
    assert (REPO in hub.private) == made
    hub.refusals.clear()
    push(exported, REPO).ok()
    assert "model.safetensors" in hub.branches[REPO, "main"]


def test_a_signal_during_the_upload_ends_it_before_anything_is_published(push: Any, hub: Hub, bag: Path) -> None:
    hub.stops_at = f"POST /api/models/{REPO}/preupload"
    assert push(bag, REPO, "--public").code == ExitCode.INTERRUPTED
    assert hub.branches == {}
    hub.stops_at = ""
    assert push(bag, REPO, "--public").code == 0
    assert "README.md" in hub.branches[REPO, "main"]


def test_without_a_token_or_with_a_wrong_one_nothing_is_sent(
    push: Any, hub: Hub, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong0123456789abcdef")
    assert "hf_wrong" not in push(exported, REPO).fails(2, "the hub doesn't know the token").err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    push(exported, REPO).fails(2, "run hf auth login, or set HF_TOKEN")
    assert not hub.private


CARD = "---\ntags: [vembed]\n---\n"
TOKEN_OF_A_FILE = "holds what looks like a password or a token"


@pytest.mark.parametrize(
    ("file", "private", "message"),
    [
        ("config.json", '{"_name_or_path": "/scratch/anna/models/bert"}', "tells of this machine: /scratch/anna"),
        ("README.md", f"{CARD}read from /home/anna/rows.jsonl", "tells of this machine: /home/anna"),
        ("README.md", f"{CARD}Authorization: Bearer hf_abcdefghijkl0123456789", TOKEN_OF_A_FILE),
        ("vocab.txt", "AKIAIOSFODNN7EXAMPLE", TOKEN_OF_A_FILE),
        ("vocab.json", "AKIAIOSFODNN7EXAMPLE", TOKEN_OF_A_FILE),
        ("merges.txt", "AKIAIOSFODNN7EXAMPLE", TOKEN_OF_A_FILE),
        ("tokenizer.json", "AKIAIOSFODNN7EXAMPLE", TOKEN_OF_A_FILE),
        ("1_Pooling/config.json", "AKIAIOSFODNN7EXAMPLE", TOKEN_OF_A_FILE),
    ],
)
def test_a_secret_keeps_the_folder_here(push: Any, hub: Hub, mine: Path, file: str, private: str, message: str) -> None:
    before = (mine / file).read_text("utf-8") if (mine / file).exists() else "password= abc\n/home\n"
    (mine / file).write_text(private if " " in private else f"{before} {private}\n", "utf-8")
    push(mine, REPO).fails(2, f"{file} {message}", "Nothing was sent")
    assert hub.requests == []
    (mine / file).write_text(before, "utf-8")
    push(mine, REPO).ok()


@pytest.mark.parametrize("has_card", [True, False])
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "1_Pooling", "onnx/model.onnx"])
def test_a_link_for_a_model_file_is_refused(push: Any, hub: Hub, mine: Path, name: str, has_card: bool) -> None:
    outside = mine.with_name("outside")
    if not has_card:  # the model would be exported anew, by libraries that follow links
        (mine / "README.md").unlink()
    (mine / name).parent.mkdir(exist_ok=True)
    if (mine / name).exists():
        shutil.move(mine / name, outside)
    else:
        outside.write_text("root:x:0:0\n")
    (mine / name).symlink_to(outside)
    for words in ((mine, REPO), (mine, REPO, "--dry-run")):
        assert not push(*words).fails(2, f"{mine / name} is a link to {outside}: put the file itself in its place").out
    assert hub.requests == []


def test_links_of_a_hub_cache_are_followed(push: Any, hub: Hub, exported: Path, tmp_path: Path) -> None:
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
    out = push(snapshot, REPO, "--dry-run").ok().out
    lines = [line.split() for line in out.partition("\n\n")[0].splitlines()]
    listed = {words[-1] for words in lines if words[0] != "stays"}
    assert {words[-1] for words in lines if words[0] == "stays"} == {*unsent, "notes.txt"}
    push(snapshot, REPO).ok()
    arrived = hub.branches[REPO, "main"]
    assert arrived.keys() == listed
    assert {name: (exported / name).read_bytes() for name in listed} == arrived


def test_files_that_the_repository_ignores_are_told(push: Any, hub: Hub, exported: Path) -> None:
    hub.ignored.add("tokenizer.json")
    words = "the hub took the other files and left out tokenizer.json: the repository's .gitignore"
    assert not push(exported, REPO).fails(2, words).out
    hub.ignored.clear()
    push(exported, REPO).ok()
    assert "tokenizer.json" in hub.branches[REPO, "main"]


def test_weights_of_an_earlier_push_are_named(push: Any, hub: Hub, exported: Path) -> None:
    assert "still holds" not in push(exported, REPO).ok().out
    hub.branches[REPO, "main"] |= {
        "model-00001-of-00002.safetensors": b"",
        "adapter_config.json": b"{}",
        "mine.txt": b"",
    }
    told = push(exported, REPO).ok().out
    assert f"{REPO} still holds adapter_config.json, model-00001-of-00002.safetensors, which this model hasn't" in told
    assert "mine.txt" in hub.branches[REPO, "main"], "nothing is deleted"


@pytest.mark.parametrize("tags", ["[sentence-transformers, generated_from_trainer]", "[", "vembed-like"])
def test_a_card_of_another_tool_stays_here(push: Any, hub: Hub, mine: Path, tags: str) -> None:
    (mine / "README.md").write_text(f"---\ntags: {tags}\n---\n| a row of the training data |\n")
    push(mine, REPO).ok()
    card = hub.branches[REPO, "main"]["README.md"].decode()
    assert "a row of the training data" not in card
    assert "vembed" in block(card)["tags"]


def test_options_of_a_model_are_published_or_refused(hub: Hub, exported: Path, mine: Path, tmp_path: Path) -> None:
    options: LoadKeys = {"pooling_method": "cls", "query_prompt": "q: ", "max_seq_length": 12}
    refusal = "without max_seq_length, pooling_method, query_prompt: load the model without"
    with pytest.raises(ConfigError, match=refusal):
        vembed.load(mine, **options).push_to_hub(REPO)
    assert hub.requests == []
    (mine / "README.md").unlink()
    model = vembed.load(mine, **options)
    model.push_to_hub(REPO)
    texts = ["a red fox", "word " * 20]
    found = vembed.load(write_back(hub.branches[REPO, "main"], tmp_path / "back")).encode(texts, "query")
    assert np.array_equal(found, model.encode(texts, "query"))
    assert not np.allclose(found, vembed.load(exported).encode(texts, "query"))
