"""The leaderboard, the search page and the plans of machines that aren't there, from tiny models and sets."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from golden_runs import COLOURS, HOSTILE, TRANSFORMER, environment, run_command, without_measures, write_rows
from golden_text import page_lines, text_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

WORDS = ("apple", "train", "river", "stone", "window", "garden", "paper", "winter", "music", "bridge")


def leaderboard(tree: Path, folder: Path) -> dict[str, Any]:
    """Return the leaderboard of two models and BM25 on two sets, with shortened and quantized vectors."""
    folder.mkdir(parents=True)
    sets = [_write_set(folder / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    models = [_train(tree, folder, name, seed=seed) for seed, name in enumerate(("bag", "sack"))]
    words = ["evaluate", *models, "bm25", "--data", *sets, "--output", "board"]
    more = ["--dims", "64", "--quantize", "int8", "--index", "HNSW8"]
    places = {str(folder): "WORK", str(tree): "TREE"}
    found = {}
    for name, options in (("plain", []), ("variants", more)):
        printed = run_command(tree, folder, "vembed", *words, *options)
        board = folder / "board"
        page = page_lines(without_latency((board / "leaderboard.html").read_text("utf-8")), places)
        found[name] = {
            "printed": text_lines(without_latency(printed), places),
            "markdown": text_lines(without_latency((board / "leaderboard.md").read_text("utf-8")), places),
            "json": without_measures(json.loads((board / "leaderboard.json").read_text("utf-8")), places),
            "page": page,
            "files": sorted(str(path.relative_to(board)) for path in board.rglob("*") if path.is_file()),
        }
    return found


def without_latency(text: str) -> str:
    """Return a leaderboard without the times of a query, and without the forms that no other beats in them."""
    number = r"[\d.,e\u2212]+"
    text = re.sub(
        r'(data-label="ms per query".*?</td>)',
        lambda cell: re.sub(r"\d[\d.,e\u2212]*", "#", cell[0]),
        text,
        flags=re.DOTALL,
    )
    text = re.sub(rf" +{number} \(p95 {number}, p99 {number}\)", " #", text)
    text = re.sub(r"^(.*Bytes per document) +ms per query$", r"\1 ms per query", text, flags=re.MULTILINE)
    return re.sub(
        r"against milliseconds per query.*?(?:</figure>|\n\n\|)",
        lambda figure: re.sub(r"(cheapest first\): ).*?(\. A line)", r"\1#\2", figure[0]),
        text,
        flags=re.DOTALL,
    )


def search(tree: Path, folder: Path) -> dict[str, Any]:
    """Return the search page of texts and of pictures, before and after a query, and what the terminal shows."""
    folder.mkdir(parents=True)
    model = _train(tree, folder, "bag", seed=0)
    texts = [*(f"{colour} {word}" for colour in COLOURS[:4] for word in WORDS[:5]), "long " * 200]
    texts += [row["positive"] + row["query"] for row in HOSTILE]
    rows = ({"_id": f"d{number}", "text": text, "title": f"t{number}"} for number, text in enumerate(texts))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.txt").write_text("red apple\nblue train\n")
    places = {str(folder): "WORK", str(tree): "TREE"}
    built = run_command(tree, folder, "vembed", "encode", model, "--data", "corpus.jsonl", "--output", "texts")
    asked = ["/", "/?q=red+apple", "/?q=red+apple&k=100", "/?q=%22%3E%3Cscript%3Ealert(2)%3C/script%3E&k=5",
             "/?q=a&k=0", f"/?q={'a' * 2001}", "/?q=+", "/nowhere", "/?q=red&q=blue"]  # fmt: skip
    found: dict[str, Any] = {
        "encode": text_lines(built, places),
        "terminal": text_lines(run_command(tree, folder, "vembed", "search", "texts", "red apple", "-k", "4"), places),
        "terminal as JSON": text_lines(
            run_command(tree, folder, "vembed", "search", "texts", "red apple", "-k", "2", "--json"), places
        ),
        "terminal from a file": text_lines(
            run_command(tree, folder, "vembed", "search", "texts", "-k", "1", stdin="red apple\nblue train\n"), places
        ),
        "meta": without_measures(json.loads((folder / "texts" / "meta.json").read_text()), places),
        "texts": _pages(tree, folder, "texts", asked, places),
    }
    keys = {"model_name": "builtin:tiny-clip", "data_path": "train.jsonl", "val_data_path": "dev.jsonl"}
    clip = _train(tree, folder, "clip", seed=0, **keys)
    pictures = ["encode", clip, "--data", "builtin:shapes", "--output", "pictures"]
    found["encode pictures"] = text_lines(run_command(tree, folder, "vembed", *pictures), places)
    asked = ["/", "/?q=a+red+circle&k=5", "/?like=3&k=5", "POST", "POST no picture"]
    found["pictures"] = _pages(tree, folder, "pictures", asked, places)
    return found


def _train(tree: Path, folder: Path, name: str, **changes: Any) -> str:
    """Train a tiny model for two steps and return the name of its folder."""
    write_rows(folder)
    fixed = {"model_name": "builtin:ngram-bag", "eval_strategy": "no", "eval_steps": None, "max_steps": 2,
             "report_to": "none", "bm25": False}  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps({**TRANSFORMER, **fixed, "output_dir": name, **changes}))
    run_command(tree, folder, "run.py", f"{name}.json")
    return f"{name}/model"


def _write_set(folder: Path, *, seed: int, documents: int = 40, queries: int = 12) -> str:
    """Write a BEIR folder of random word lists, each query sharing words with its documents; return its name."""
    draw = random.Random(seed)
    texts = {f"d{row}": " ".join(draw.choices(WORDS, k=8)) for row in range(documents)}
    relevant = {f"q{row}": draw.sample(list(texts), 2) for row in range(queries)}
    asked = {name: " ".join(texts[found[0]].split()[:3]) for name, found in relevant.items()}
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", texts), ("queries", asked)):
        lines = (json.dumps({"_id": key, "text": text}) for key, text in rows.items())
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    judged = (f"{query}\t{name}\t{grade}" for query, found in relevant.items() for grade, name in enumerate(found, 1))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n")
    return folder.name


def _pages(tree: Path, folder: Path, index: str, asked: Iterable[str], places: dict[str, str]) -> dict[str, Any]:
    """Serve an index and return what the page answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vembed", "search", index, "--serve", "--port", "0"],
        cwd=folder, env=environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stdout.read()
        return {"announced": text_lines(line, places), **{path[:60]: _ask(found[0], path, places) for path in asked}}
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _ask(url: str, path: str, places: dict[str, str]) -> dict[str, Any]:
    request = Request(url + path) if path.startswith("/") else _upload(url, is_picture=path == "POST")
    try:
        with urlopen(request, timeout=60) as answer:
            status, headers, text = answer.status, answer.headers, answer.read().decode()
    except HTTPError as error:
        status, headers, text = error.code, error.headers, error.read().decode()
    names = ("Content-Type", "Content-Security-Policy", "Cache-Control", "Referrer-Policy", "X-Content-Type-Options")
    shown: Mapping[str, str] = {name: headers[name] for name in names if headers[name]}
    policy = {name: re.sub(r"'sha256-[^']*'", "'sha256-#'", value) for name, value in shown.items()}
    return {"status": status, "headers": policy, "page": page_lines(text, places)}


def _upload(url: str, *, is_picture: bool) -> Request:
    """Return a form with a small picture, or with what is none, as a browser sends it."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 30, 30)).save(file, "PNG")
    content = file.getvalue() if is_picture else b"no picture"
    head = b'Content-Disposition: form-data; name="picture"; filename="x.png"\r\nContent-Type: image/png\r\n\r\n'
    count = b'Content-Disposition: form-data; name="k"\r\n\r\n5'
    body = b"--limit\r\n" + count + b"\r\n--limit\r\n" + head + content + b"\r\n--limit--\r\n"
    return Request(url + "/", data=body, headers={"Content-Type": "multipart/form-data; boundary=limit"}, method="POST")
