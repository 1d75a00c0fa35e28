"""`vembed encode` and `vembed search`: files, ranks, the terminal, the page, and what they refuse."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from command_cases import environment

import vembed
from vembed.entrypoints import encode as encode_command
from vembed.entrypoints import search as search_command
from vembed.models.ngram_bag import NgramBag, NgramBagConfig
from vembed.search import build
from vembed.search.terminal import clip_to_width

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
DOCUMENTS = {
    "d1": "red apples grow on trees",
    "d2": "the train leaves at noon",
    "d3": "a recipe for apple pie",
    "d4": "hostile <script>alert(1)</script> & \x1b[31m \u202e text",
}
FILES = {"vectors.npy", "ids.jsonl", "index.faiss", "meta.json"}


@dataclass(frozen=True)
class Done:
    """What a command printed and returned."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a command in this process: call("encode", MODEL, ...)."""

    def run(command: str, *words: object) -> Done:
        module = {"encode": encode_command, "search": search_command}[command]
        capsys.readouterr()
        try:
            code = module.main([str(word) for word in words], program=f"vembed {command}")
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def write_corpus(path: Path, documents: dict[str, str] = DOCUMENTS) -> Path:
    path.write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in documents.items()))
    return path


@pytest.fixture(scope="session")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bag") / "bag"
    torch.manual_seed(0)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16)).save(folder)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def index(bag: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that the tests only read."""
    folder: Path = tmp_path_factory.mktemp("index") / "index"
    vembed.build_index(bag, corpus, folder)
    return folder


def meta_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    return content


# --- encode


def test_the_folder_holds_vectors_ids_index_and_meta(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    import faiss

    folder = tmp_path / "deep" / "index"
    done = call("encode", bag, "--data", corpus, "--output", folder)
    assert done.code == 0, done.err
    assert "4 documents, 64 dimensions, index Flat" in done.out
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["index"], "nothing is left beside it"
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, vembed.load(bag).encode(DOCUMENTS.values(), "document"))
    rows = [json.loads(line) for line in (folder / "ids.jsonl").read_text().splitlines()]
    assert {row["id"]: row["text"] for row in rows} == DOCUMENTS
    flat = faiss.read_index(str(folder / "index.faiss"))
    np.testing.assert_array_equal(flat.reconstruct_n(0, 4), vectors)
    meta = meta_of(folder)
    assert meta["model"]["name"] == str(bag)
    assert re.fullmatch(r"[0-9a-f]{64}", meta["model"]["weights_sha256"])
    assert (meta["model"]["dimension"], meta["model"]["similarity"], meta["num_documents"]) == (64, "cosine", 4)
    assert (meta["vembed_version"], meta["side"], meta["factory"]) == (vembed.__version__, "document", "Flat")


def test_equal_inputs_give_equal_bytes(bag: Path, corpus: Path, index: Path, tmp_path: Path) -> None:
    vembed.build_index(vembed.load(bag), corpus, tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (index / name).read_bytes(), name


def test_slices_change_nothing(
    bag: Path, corpus: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SLICE_ROWS", 3)
    vembed.build_index(bag, corpus, tmp_path / "sliced")
    for name in FILES:
        assert (tmp_path / "sliced" / name).read_bytes() == (index / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["beir", "csv", "tsv", "parquet", "json", "txt", "gz"])
def test_every_kind_of_corpus_gives_the_same_documents(kind: str, bag: Path, tmp_path: Path) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = {"1": "red apples", "2": "the train, at noon", "3": "apple pie"}
    path = tmp_path / {"beir": "corpus.jsonl", "gz": "corpus.jsonl.gz"}.get(kind, f"corpus.{kind}")
    if kind == "beir":
        write_corpus(path, documents)
        path = tmp_path
    elif kind == "gz":
        path.write_bytes(gzip.compress(write_corpus(tmp_path / "c", documents).read_bytes()))
    elif kind == "parquet":
        table = {"docid": [int(name) for name in documents], "passage": list(documents.values()), "other": [0] * 3}
        pq.write_table(pa.table(table), path)
    elif kind == "json":
        path.write_text(json.dumps([{"id": name, "title": None, "content": text} for name, text in documents.items()]))
    elif kind == "txt":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(documents.values()).encode())
    else:
        cells = [("id", "text"), *documents.items()]
        line = '{}\t"{}"' if kind == "tsv" else '{},"{}"'
        path.write_text("\n".join(line.format(*row) for row in cells))
    vembed.build_index(bag, path, tmp_path / "index")
    rows = [json.loads(line) for line in (tmp_path / "index" / "ids.jsonl").read_text().splitlines()]
    assert {row["id"]: row["text"] for row in rows} == documents


@pytest.mark.slow
def test_a_built_in_set_is_a_corpus(bag: Path, tmp_path: Path) -> None:
    assert vembed.build_index(bag, "builtin:stdlib-code", tmp_path / "index").num_documents > 100


def test_titles_columns_and_empty_texts(call: Any, bag: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"key": 7, "title": "Pie", "body": "with apples"}\n\n{"key": 8, "body": ""}\n')
    refused = call("encode", bag, "--data", path, "--output", tmp_path / "x")
    assert refused.code == 3
    assert "c.jsonl:1: no column '_id' or 'id'" in refused.err
    assert "--id-column" in refused.err
    near = call("encode", bag, "--data", path, "--output", tmp_path / "x", "--id-column", "key", "--text-column", "bdy")
    assert "did you mean 'body'" in near.err
    taken = call(
        "encode", bag, "--data", path, "--output", tmp_path / "x", "--id-column", "key", "--text-column", "body"
    )
    assert taken.code == 0, taken.err
    assert "1 document has neither a title nor a text." in taken.out
    rows = [json.loads(line) for line in (tmp_path / "x" / "ids.jsonl").read_text().splitlines()]
    assert rows == [{"id": "7", "text": "Pie with apples"}, {"id": "8", "text": ""}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"_id": "a", "text": ', "c.jsonl:2: bad JSON"),
        ('{"_id": "d1", "text": "b"}', "c.jsonl:2: _id: 'd1' stands twice"),
        ('{"_id": "a", "text": null}', "c.jsonl:2: text: missing"),
        ('{"_id": "a", "text": 3}', "c.jsonl:2: text: expected text, got int"),
        ('{"_id": 1.5, "text": "b"}', "c.jsonl:2: _id: missing, or neither"),
        ('{"_id": "a", "text": "nul \\u0000"}', "c.jsonl:2: text: holds a NUL byte"),
        ('{"_id": "a", "text": "b", "image": "c.png"}', "c.jsonl:2: column 'image'"),
    ],
)
def test_a_broken_row_is_named_and_nothing_is_written(
    call: Any, bag: Path, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(f'{{"_id": "d1", "text": "a"}}\n{line}\n')
    refused = call("encode", bag, "--data", path, "--output", tmp_path / "index")
    assert refused.code == 3
    assert message in refused.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.jsonl"]
    path.write_text('{"_id": "d1", "text": "a"}\n')
    assert call("encode", bag, "--data", path, "--output", tmp_path / "index").code == 0


def test_what_is_no_corpus_is_refused(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "a.bin").write_text("x")
    for data, message in {
        tmp_path / "empty.txt": "holds no documents",
        tmp_path / "a.bin": "unknown kind of file",
        tmp_path: "has no corpus.jsonl",
        corpus.with_name("korpus.jsonl"): "did you mean 'corpus.jsonl'",
        "https://user:canary@host/x": "is an address",
    }.items():
        refused = call("encode", bag, "--data", data, "--output", tmp_path / "index")
        assert refused.code == 3
        assert message in refused.err
        assert "canary" not in refused.err
    assert not (tmp_path / "index").exists()


def test_an_index_is_replaced_only_when_asked_and_other_files_never(
    call: Any, bag: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    assert call("encode", bag, "--data", corpus, "--output", folder).code == 0
    before = (folder / "meta.json").read_bytes()
    refused = call("encode", bag, "--data", corpus, "--output", folder, "--index", "HNSW32")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert (folder / "meta.json").read_bytes() == before
    assert call("encode", bag, "--data", corpus, "--output", folder, "--index", "HNSW32", "--overwrite").code == 0
    assert meta_of(folder)["factory"] == "HNSW32"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    other = call("encode", bag, "--data", corpus, "--output", tmp_path / "thesis", "--overwrite")
    assert other.code == 2
    assert "holds other files" in other.err
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_a_failed_replacement_leaves_the_old_index(
    call: Any, bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    vembed.build_index(bag, corpus, folder)
    before = {name: (folder / name).read_bytes() for name in FILES}

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_durably", full)
        refused = call("encode", bag, "--data", corpus, "--output", folder, "--overwrite")
    assert refused.code == 5
    assert "No space left" in refused.err
    assert {name: (folder / name).read_bytes() for name in FILES} == before
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert call("search", folder, "apple").code == 0


def test_a_disk_that_is_too_small_is_said_before_encoding(
    bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(vembed.MachineError, match="GB free"):
        vembed.build_index(bag, corpus, tmp_path / "index")
    monkeypatch.undo()
    vembed.build_index(bag, corpus, tmp_path / "index")


def test_an_unknown_factory_is_refused_before_encoding(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    refused = call("encode", bag, "--data", corpus, "--output", tmp_path / "index", "--index", "Flit")
    assert refused.code == 2
    assert "Flit" in refused.err
    assert not (tmp_path / "index").exists()


def test_a_signal_stops_it_and_nothing_is_left(bag: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "big.txt"
    corpus.write_text("\n".join(f"document number {number} about apples and trains" for number in range(300_000)))
    (tmp_path / "out").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "vembed", "encode", bag, "--data", corpus, "--output", tmp_path / "out/i"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    try:
        deadline = 600
        while not any((tmp_path / "out").glob(".i.tmp/ids.jsonl")) and deadline:
            deadline -= 1
            try:
                process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                continue
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert "nothing was written" in err
    assert not list((tmp_path / "out").iterdir())


def test_cut_texts_are_counted(call: Any, bag: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text(f"short\n{'word ' * 17}\n")
    done = call("encode", bag, "--data", path, "--output", tmp_path / "index")
    assert "1 texts are longer than the 16 tokens" in done.out
    assert meta_of(tmp_path / "index")["num_truncated"] == 1


# --- search in the terminal


def test_the_right_document_is_first_and_every_line_fits(
    call: Any, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    done = call("search", index, "apple pie recipe", "-k", "4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert re.fullmatch(r" 1  {1,2}-?0\.\d{4}  d3", lines[0])
    assert lines[1] == "    a recipe for apple pie"
    assert len(lines) == 8
    assert all(len(line) <= 30 for line in lines)
    assert any(line.endswith("…") for line in lines), "something was long enough to be cut"


def test_text_can_not_steer_the_terminal(call: Any, index: Path) -> None:
    done = call("search", index, "hostile text", "-k", "1")
    assert "d4" in done.out
    assert r"\x1b[31m" in done.out
    assert r"\u202e" in done.out
    assert not {unicodedata.category(each) for each in done.out if each != "\n"} & {"Cc", "Cf"}


def test_json_is_one_object_and_nothing_else_on_the_output(call: Any, index: Path) -> None:
    done = call("search", index, "train leaves", "-k", "9", "--json")
    content = json.loads(done.out)
    assert content["query"] == "train leaves"
    assert [hit["rank"] for hit in content["hits"]] == [1, 2, 3, 4]
    assert content["hits"][0] | {"score": 0} == {"rank": 1, "id": "d2", "score": 0, "text": DOCUMENTS["d2"]}
    assert "k = 9 is over the size of the index: 4 documents are ranked" in done.err
    assert done.out.isascii()
    assert "over the size" not in call("search", index, "train", "-k", "4").err


def test_scores_are_inner_products_best_first(index: Path, bag: Path) -> None:
    (hits,) = vembed.open_index(index).search(["apple trees"], k=4)
    model = vembed.load(bag)
    expected = model.encode(["apple trees"], "query")[0] @ model.encode(DOCUMENTS.values(), "document").T
    order = np.argsort(-expected)
    assert [hit.id for hit in hits] == [list(DOCUMENTS)[row] for row in order]
    np.testing.assert_allclose([hit.score for hit in hits], expected[order], atol=1e-6)
    assert [hit.text for hit in hits] == [DOCUMENTS[hit.id] for hit in hits]


def test_queries_come_from_the_input_line_by_line(call: Any, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for as_json in (False, True):
        monkeypatch.setattr("sys.stdin", io.StringIO("apple pie\n\n  train at noon\n"))
        done = call("search", index, "-k", "1", *(["--json"] if as_json else []))
        assert done.code == 0
        if as_json:
            assert [json.loads(line)["hits"][0]["id"] for line in done.out.splitlines()] == ["d3", "d2"]
        else:
            assert re.findall(r"^query> (.+)$|  (d\d)$", done.out, flags=re.MULTILINE) == [
                ("apple pie", ""), ("", "d3"), ("train at noon", ""), ("", "d2"),
            ]  # fmt: skip


def test_a_terminal_is_asked_with_a_prompt(call: Any, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("apple pie\n"))
    done = call("search", index, "-k", "1")
    assert done.err.count("query> ") == 2, "once for the query, once before the end of the input"
    assert "query>" not in done.out
    assert "d3" in done.out


@pytest.mark.slow
def test_output_that_nobody_reads_on_is_no_error(index: Path, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("apple\n" * 20_000)
    command = f"{sys.executable} -m vembed search {index} < queries.txt | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), cwd=tmp_path,
                          timeout=120, check=True)  # fmt: skip
    assert done.stdout.splitlines() == ["query> apple", "0"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "-k", "0"], "-k must be at least 1"),
        ([" "], "the query is empty"),
        (["x", "--serve"], "leave out the query"),
        (["--serve", "--port", "70000"], "--port must be from 0 to 65535"),
        (["x", "--port", "80"], "add --serve"),
    ],
)
def test_contradictions_are_refused(call: Any, index: Path, words: list[str], message: str) -> None:
    refused = call("search", index, *words)
    assert refused.code == 2
    assert message in refused.err


def test_clipping_counts_terminal_columns() -> None:
    assert clip_to_width("abcdef", 6) == "abcdef"
    assert clip_to_width("abcdefg", 6) == "abcde…"
    assert clip_to_width("日本語日本語", 7) == "日本語…"
    assert clip_to_width("日本語", 6) == "日本語"
    assert clip_to_width("e\u0301" * 6, 6) == "e\u0301" * 6


# --- search: the right model, whole files


def test_another_models_weights_are_refused(call: Any, index: Path, bag: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096)).save(tmp_path / "other")
    refused = call("search", index, "apple", "--model", tmp_path / "other")
    assert refused.code == 2
    assert "its vectors mean something else" in refused.err
    shutil.copytree(bag, tmp_path / "copy")
    assert call("search", index, "apple", "--model", tmp_path / "copy").code == 0


def test_the_same_weights_read_otherwise_are_refused(tmp_path: Path, corpus: Path) -> None:
    from vembed.models.tiny_transformer import build_tiny_transformer

    torch.manual_seed(0)
    folder = tmp_path / "tiny"
    build_tiny_transformer(DOCUMENTS.values(), name="tiny", dtype=torch.float32).save(folder)
    vembed.build_index(vembed.load(folder, document_prompt="text: "), corpus, tmp_path / "index")
    assert meta_of(tmp_path / "index")["model_options"] == {"document_prompt": "text: "}
    assert len(vembed.open_index(tmp_path / "index")) == 4, "the option is kept"
    pooling = folder / "1_Pooling" / "config.json"
    content = json.loads(pooling.read_text())
    pooling.write_text(json.dumps(content | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}))
    with pytest.raises(vembed.ConfigError, match="another vector for its first document"):
        vembed.open_index(tmp_path / "index")


def test_a_model_that_moved_is_named(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(bag, tmp_path / "model")
    vembed.build_index(tmp_path / "model", corpus, tmp_path / "index")
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    refused = call("search", tmp_path / "index", "apple")
    assert refused.code == 2
    assert "isn't there any more; name its new place with --model" in refused.err
    assert call("search", tmp_path / "index", "apple", "--model", tmp_path / "elsewhere").code == 0


def test_the_relative_path_of_a_model_is_kept_as_an_absolute_one(
    bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bag.parent)
    vembed.build_index(bag.name, corpus, tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    assert len(vembed.open_index("index")) == 4


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_missing_or_cut_is_named(call: Any, index: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(index, tmp_path / "index")
    path = tmp_path / "index" / name
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    cut = call("search", tmp_path / "index", "apple")
    assert cut.code == 3
    assert name in cut.err
    path.unlink()
    missing = call("search", tmp_path / "index", "apple")
    assert missing.code == 3
    assert name in missing.err
    path.write_bytes(content)
    assert call("search", tmp_path / "index", "apple").code == 0


def test_what_is_no_index_or_of_a_later_version_is_refused(call: Any, index: Path, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "index")
    path = tmp_path / "index" / "meta.json"
    for changes, message in (({"format_version": 2}, "update vembed"), ({"kind": "x"}, "something else than an index")):
        path.write_text(json.dumps(meta_of(index) | changes))
        refused = call("search", tmp_path / "index", "apple")
        assert refused.code == 3
        assert message in refused.err
    assert "make one with vembed encode" in call("search", tmp_path / "nothing", "apple").err


# --- the page


@dataclass(frozen=True)
class Page:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]

    def get(self, path: str = "", **headers: str) -> tuple[int, str, Any]:
        try:
            with urlopen(Request(self.url + path, headers=headers), timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except HTTPError as error:
            return error.code, error.read().decode(), error.headers


def start_page(index: Path) -> Page:
    process = subprocess.Popen(
        [sys.executable, "-m", "vembed", "search", str(index), "--serve", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert found, line + process.stdout.read()
    return Page(found.group(), process)


@pytest.fixture(scope="module")
def page(index: Path) -> Iterator[Page]:
    started = start_page(index)
    yield started
    started.process.kill()
    started.process.communicate()


def test_the_page_answers_a_plain_form(page: Page) -> None:
    status, empty, headers = page.get()
    assert status == 200
    assert '<form method="get" action="/"' in empty
    assert "<li>" not in empty
    assert "4 documents of corpus.jsonl" in empty
    assert "<script" not in empty
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    status, found, _ = page.get("?q=apple+pie+recipe&k=2")
    assert status == 200
    assert re.findall(r'class="id" dir="auto">(\w+)<', found)[0] == "d3"
    assert found.count("<li>") == 2
    assert re.search(r"score 0\.\d{4}", found)
    assert "all there are, of 10 asked for" in page.get("?q=apple")[1]
    assert "all there are" not in found


def test_the_style_is_the_one_that_the_policy_allows(page: Page) -> None:
    import base64
    import hashlib

    _, text, headers = page.get()
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in headers["Content-Security-Policy"]
    assert "style=" not in text


def test_documents_and_queries_are_shown_and_never_run(page: Page) -> None:
    hostile = '"><script>alert(2)</script>\x1b'
    _, text, _ = page.get(f"?q={quote(hostile)}")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; \\x1b[31m \\u202e" in text
    assert 'value="&quot;&gt;&lt;script&gt;alert(2)&lt;/script&gt;' in text


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("?q=a&k=0", 400, "k is a whole number from 1 to 100"),
        ("?q=a&k=x", 400, "k is a whole number"),
        (f"?q={'a' * 2001}", 400, "has 2,001 characters; at most 2,000"),
        (f"?q={'a' * 70_000}", 414, ""),
        ("?" + "&".join(f"a{number}=1" for number in range(40)), 400, "Too many fields"),
        ("etc/passwd", 404, "one page here"),
        ("../../etc/passwd", 404, "one page here"),
    ],
)
def test_the_page_refuses_with_a_sentence_and_goes_on(page: Page, path: str, status: int, message: str) -> None:
    answered, text, headers = page.get(path)
    assert answered == status
    assert message in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert page.get(f"?q={'a' * 2000}&k=100")[0] == 200


def test_other_methods_and_other_hosts_are_refused(page: Page) -> None:
    assert page.get("", Host="evil.example")[0] == 403
    assert page.get("", Host="localhost:9999")[0] == 200
    with pytest.raises(HTTPError) as caught:
        urlopen(Request(page.url, data=b"q=a", method="POST"), timeout=30)
    assert caught.value.code == 501
    with urlopen(Request(page.url, method="HEAD"), timeout=30) as answer:
        assert answer.read() == b""


def test_many_ask_at_once(page: Page) -> None:
    from concurrent.futures import ThreadPoolExecutor

    queries = {"apple+pie+recipe": "d3", "train+at+noon": "d2", "red+trees": "d1"}
    asked = list(queries) * 5
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda query: page.get(f"?q={query}&k=1")[1], asked)
        assert [re.findall(r'class="id" dir="auto">(\w+)<', text) for text in answers] == [[queries[q]] for q in asked]


def test_a_port_that_is_taken_is_said(call: Any, page: Page, index: Path) -> None:
    port = page.url.rstrip("/").rpartition(":")[2]
    refused = call("search", index, "--serve", "--port", port)
    assert refused.code == 5
    assert f"port {port} can't be used" in refused.err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_page_cleanly_even_with_an_open_connection(index: Path, number: signal.Signals) -> None:
    import socket

    started = start_page(index)
    with socket.create_connection(("127.0.0.1", int(started.url.rstrip("/").rpartition(":")[2]))) as idle:
        idle.sendall(b"GET / HT")
        assert started.get()[0] == 200
        started.process.send_signal(number)
        out, _ = started.process.communicate(timeout=30)
    assert started.process.returncode == 0
    assert out.strip() == "ended"


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here: a browser is needed to see the page as one does")
def test_a_real_browser_shows_the_right_document_first(page: Page, tmp_path: Path) -> None:
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--enable-logging=stderr", "--dump-dom", f"{page.url}?q=apple+pie+recipe"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    hits = re.findall(r"<li>(.*?)</li>", done.stdout, flags=re.DOTALL)
    assert len(hits) == 4
    assert ">d3<" in hits[0]
    assert "a recipe for apple pie" in hits[0]
    assert "<script" not in done.stdout
    refused = [line for line in done.stderr.splitlines() if "Content Security Policy" in line or "CONSOLE" in line]
    assert not refused, "the page asks for nothing that its own policy forbids"
