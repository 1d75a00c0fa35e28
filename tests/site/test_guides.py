"""README and guides: every block of rows, keys, commands and Python is run as it stands, at a tiny size."""

from __future__ import annotations

import json
import shlex
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import PIL.Image
import PIL.ImageDraw
import pytest
from document_blocks import PAGE_NAMES, ROOT, RUN, blocks_of
from kit.picture_models import write_picture_model
from kit.runs import word_pairs, write_rows
from kit.text_models import write_model
from vision_language_cases import write_vision_language

from vembed import __main__
from vembed.config.load import load_config
from vembed.entrypoints import train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOT_RUN = {
    "python -m pip install -c constraints.txt -e .": "the test environment is already installed",
    'python -m pip install -c constraints.txt -e ".[test]"': "the continuous integration runs it from an empty "
    "environment",
    "pytest": "the continuous integration runs it from an empty environment",
}
"""First line of a block that isn't run -> why, as the page's mark says it."""

TINY = {
    "max_steps": 2, "warmup_steps": 0, "batch_size": 8, "samples_per_class": 4, "eval_strategy": "no",
    "eval_steps": None, "bm25": False, "report_to": "none", "num_workers": 0, "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip
"""Keys that make a run of a guide a matter of seconds."""

MODELS: dict[str, Callable[[Path], Path | str]] = {
    "sentence-transformers/all-MiniLM-L6-v2": lambda folder: write_model(folder, "bert"),
    "BAAI/bge-base-en-v1.5": lambda folder: write_model(folder, "bert"),
    "openai/clip-vit-base-patch32": lambda folder: write_picture_model(folder, "clip"),
    "facebook/dinov2-base": lambda folder: write_picture_model(folder, "dinov2"),
    "Qwen/Qwen3-VL-Embedding-2B": lambda folder: write_vision_language(folder, "qwen3_vl"),
    "vidore/colqwen2-v1.0-hf": lambda folder: write_vision_language(folder, "colqwen2"),
}
"""Hub id -> what writes a tiny model of the same class."""

COLOURS = ("red", "green", "blue", "yellow", "black", "brown", "grey", "pink")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the guides speak of, which is the current one."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    pairs = word_pairs()
    write_rows(tmp_path / "pairs.jsonl", pairs[:84])
    documents = [{"_id": f"d{number}", "title": "", "text": row["positive"]} for number, row in enumerate(pairs[84:])]
    queries = [{"_id": f"q{number}", "text": row["query"]} for number, row in enumerate(pairs[84:])]
    write_rows(tmp_path / "corpus.jsonl", documents)
    write_rows(tmp_path / "beir" / "corpus.jsonl", documents)
    write_rows(tmp_path / "beir" / "queries.jsonl", queries)
    judged = [f"q{number}\td{number}\t1" for number in range(len(queries))]
    write_rows(tmp_path / "beir" / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore", *judged])
    pictures = draw(tmp_path / "pictures")
    captions = [{"query": f"a {name} ball", "positive_image": f"pictures/{name}.png"} for name in pictures]
    write_rows(tmp_path / "captions.jsonl", captions)
    write_rows(tmp_path / "pages.jsonl", captions)
    named = list(zip(pictures[::2], pictures[1::2], strict=True))
    products = [
        {"query_image": f"pictures/{one}.png", "positive_image": f"pictures/{other}.png", "label": number}
        for number, (one, other) in enumerate(named)
    ]
    write_rows(tmp_path / "products.jsonl", products)
    composed = [
        {"query": f"but {other}", "query_image": f"pictures/{one}.png", "positive_image": f"pictures/{other}.png"}
        for one, other in named
    ]
    write_rows(tmp_path / "composed.jsonl", composed)
    classes = [row | {"label": row["query"].split()[1]} for row in pairs]
    write_rows(tmp_path / "classes.jsonl", classes)
    graded = [
        {"sentence1": row["query"], "sentence2": row["positive"], "score": number % 5 / 4}
        for number, row in enumerate(pairs)
    ]
    write_rows(tmp_path / "graded.jsonl", graded)
    (search,) = [block for block in blocks_of("docs/guides/text_search.md") if block.name == "search.yaml"]
    (tmp_path / search.name).write_text(search.text, "utf-8")
    return tmp_path


def draw(folder: Path) -> list[str]:
    """Draw balls of a few colours and sizes; return their names."""
    folder.mkdir()
    names = [*COLOURS, *(f"{colour}_{size}" for colour in COLOURS for size in (2, 3, 4))]
    for name in names:
        colour, _, size = name.partition("_")
        picture = PIL.Image.new("RGB", (64, 64), "white")
        edge = 4 * int(size or 1)
        PIL.ImageDraw.Draw(picture).ellipse((edge, edge, 64 - edge, 60 - edge), fill=colour)
        picture.save(folder / f"{name}.png")
    return names


def test_each_block_that_is_not_run_says_why() -> None:
    blocks = [block for name in PAGE_NAMES for block in blocks_of(name) if block.language in RUN]
    assert len(blocks) > 40
    assert {block.text.splitlines()[0]: block.not_run for block in blocks if block.not_run} == NOT_RUN


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_rows_and_keys_of_a_page_are_valid(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks_of(name):
        if block.language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
            assert (folder / block.name).is_file(), "the rows shown are those that the commands read"
        elif block.language == "yaml" and block.name:
            (folder / block.name).write_text(block.text, "utf-8")
            assert train.main([block.name, "--validate"], program="vembed train") == 0, capsys.readouterr().err
        elif block.language == "yaml":
            (folder / "part.yaml").write_text(f"model_name: some/model\n{block.text}", "utf-8")
            load_config(folder / "part.yaml")


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_every_fence_of_a_page_has_a_language_that_is_known(name: str) -> None:
    assert {block.language for block in blocks_of(name)} <= {*RUN, "text"}, "outputs are text"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE_NAMES)
def test_a_page_runs_from_top_to_bottom(
    name: str, folder: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiny(text: str) -> str:
        for model in MODELS:
            if model in text:
                text = text.replace(model, str(stand_in(model, folder / "stand-ins")))
        return text

    write_model(folder / "tuned-model", "bert", hidden_size=128)
    for config in (folder / "configs").glob("quickstart*.yaml"):
        kept = [line for line in config.read_text("utf-8").splitlines() if line.partition(":")[0] not in TINY]
        config.write_text("\n".join([*kept, *(f"{key}: {json.dumps(value)}" for key, value in TINY.items())]), "utf-8")
    (folder / "search.yaml").write_text(tiny((folder / "search.yaml").read_text("utf-8")), "utf-8")
    names: dict[str, Any] = {}
    for block in blocks_of(name):
        if block.not_run or block.language not in RUN:
            continue
        if block.language == "yaml" and block.name:
            (folder / block.name).write_text(tiny(block.text), "utf-8")
        elif block.language == "python":
            exec(compile(tiny(block.text), name, "exec"), names)
        for line in block.commands if block.language == "bash" else ():
            words = shlex.split(tiny(line))
            words = ["vembed", "train", *words[2:]] if words[:2] == ["python", "run.py"] else words
            assert words[0] == "vembed", f"{line}: mark the block with <!-- not run: why -->"
            if words[1] == "train":
                overrides = [word for word in words if "=" in word]
                words = [word for word in words if word not in (*overrides, "--config_override")]
                words += [
                    "--config_override",
                    *(word for word in overrides if word.partition("=")[0] not in TINY),
                    *(f"{key}={json.dumps(value)}" for key, value in TINY.items()),
                ]
            capsys.readouterr()
            monkeypatch.setattr("sys.argv", words)
            code = __main__.main()
            printed = capsys.readouterr()
            assert code == 0, f"{line}\n{printed.out[-2000:]}\n{printed.err[-2000:]}"
            if words[1] == "init":
                written = folder / (words[words.index("--output") + 1] if "--output" in words else "config.yaml")
                written.write_text(tiny(written.read_text("utf-8")), "utf-8")


@cache
def stand_in(model: str, folder: Path) -> Path | str:
    """Write a tiny model of the class of a hub model, once."""
    folder.mkdir(exist_ok=True)
    return MODELS[model](folder / model.rpartition("/")[2])
