"""Each door of a plugin takes one file in a folder of somebody's, and the names of an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.recipes import recipe, run_recipe, write_recipe
from kit.warm import run_warm

import vembed
from vembed.api.retrieval import index_corpus
from vembed.entrypoints.evaluate import EvaluateOptions
from vembed.entrypoints.options import EXTENSIBLE, AddedOptions, check, parse_words, register_options
from vembed.errors import ConfigError
from vembed.models.export_formats import OUR_FORMS, register_export
from vembed.models.exportable import FORMS
from vembed.registry import COMMANDS, EXPORTS, INDEX_FORMATS, OPTIONS, Registry
from vembed.section import option
from vembed.vectors.keys import IndexKeys
from vembed.workflows.search.output import PARQUET, output_form, register_index_format, table_format

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = ("apple", "train", "list", "river", "lamp", "noon", "pie", "green", "sort", "tree", "fox", "leaves")
MANY = [f"{one} {two}" for one in WORDS for two in WORDS]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a corpus and rows."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"_id": f"d{number}", "text": text}) for number, text in enumerate(MANY)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    rows = [{"query": f"an {text}", "positive": text} for text in MANY[:20]]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


@pytest.fixture
def program(place: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in that folder."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return run_warm(["-m", "vembed", *map(str, words)], cwd=place, env=os.environ, scratch=place)

    return run


def hits(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["hits"]


@pytest.mark.slow
def test_an_index_format_of_one_file_is_written_and_searched(program: Any, bag: Path, place: Path) -> None:
    write_recipe(place, "my_indexes")
    words = ("encode", bag, "--data", "corpus.jsonl", "--output")
    refused = program(*words, "a.arrow", "--format", "arrow")
    assert refused.returncode == 2
    assert "invalid choice: 'arrow' (choose from" in refused.stderr
    done = program("--plugins", "my_indexes", *words, "a.arrow")
    assert done.returncode == 0, done.stderr
    assert "144 documents, 64 dimensions, Arrow: a.arrow" in done.stdout
    assert program(*words, "index").returncode == 0
    question = ("apple tree", "--json", "-k", 20)
    assert hits(program("--plugins", "my_indexes", "search", "a.arrow", *question)) == hits(
        program("search", "index", *question)
    )
    again = program("--plugins", "my_indexes", *words, "a.arrow")
    assert "a.arrow holds vectors; replace them with --overwrite" in again.stderr
    wrong = program("--plugins", "my_indexes", *words, "folder", "--format", "arrow")
    assert "--format arrow doesn't fit --output folder: an Arrow file's name ends in .arrow" in wrong.stderr


@pytest.fixture
def index_formats(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A table of its own, with Parquet."""
    table = Registry("index format", {"parquet": "vembed.workflows.search.output:PARQUET"})
    for module in ("output", "tables", "format"):
        monkeypatch.setattr(f"vembed.workflows.search.{module}.INDEX_FORMATS", table)
    monkeypatch.setattr("vembed.entrypoints.encode.INDEX_FORMATS", table)
    return table


def folder_format(name: str, **facts: Any) -> None:
    """Register a format that writes Parquet into a folder."""
    register_index_format(
        name,
        write=lambda path, schema, batches: PARQUET.write(path / "rows.bin", schema, batches),
        read=lambda path: PARQUET.read(path / "rows.bin"),
        owns=lambda path: (path / "rows.bin").is_file(),
        **facts,
    )


def test_a_folder_of_an_added_format_replaces_an_index_and_makes_room_for_one(
    index_formats: Registry, bag: Path, place: Path
) -> None:
    folder_format("shelf", entries=("rows.bin",))
    keys = IndexKeys().model_copy(update={"format": "shelf", "overwrite": True})  # unchecked: the table is a stand-in
    vembed.build_index(bag, place / "corpus.jsonl", place / "out")
    index = vembed.open_index(place / "out").search(["apple tree"], 20)
    index_corpus(vembed.load(bag), place / "corpus.jsonl", place / "out", keys)
    assert sorted(path.name for path in (place / "out").iterdir()) == ["rows.bin"]
    found = table_format(place / "out")
    assert found is not None
    assert found.title == "shelf"
    assert vembed.open_index(place / "out").search(["apple tree"], 20) == index
    vembed.build_index(bag, place / "corpus.jsonl", place / "out", overwrite=True)
    assert "rows.bin" not in [path.name for path in (place / "out").iterdir()]
    assert table_format(place / "out") is None


def test_index_formats_that_cannot_be_are_refused(index_formats: Registry) -> None:
    with pytest.raises(ConfigError, match="already that of vembed"):
        folder_format("index")
    with pytest.raises(ConfigError, match="already that of vembed"):
        folder_format("parquet")
    with pytest.raises(ConfigError, match="a suffix begins with a dot"):
        folder_format("shelf", suffix="shelf")
    folder_format("shelf", packages=("no_such_package_of_ours",))
    with pytest.raises(
        ConfigError, match="--format shelf needs no_such_package_of_ours, which is missing: pip install no"
    ):
        output_form(Path("out"), "shelf")
    with pytest.raises(ConfigError, match="the format 'shlf' is unknown; choose one of index, parquet, shelf"):
        output_form(Path("out"), "shlf")


@pytest.mark.slow
def test_an_export_format_of_one_file_writes_beside_the_model(program: Any, bag: Path, place: Path) -> None:
    write_recipe(place, "my_exports")
    done = program("--plugins", "my_exports", "export", bag, "--format", "numpy", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "\nsamples.npz: query texts, document texts\n" in done.stdout
    vectors = np.load(place / "out" / "samples.npz")["document texts"]
    assert vectors.shape == (4, 64)
    np.testing.assert_allclose(vectors[:1], vembed.load(place / "out").encode(["sea"], "document"), atol=1e-6)
    (place / "failing.py").write_text(
        "import vembed\n\n@vembed.register_export('failing')\ndef write(encoder, folder, options):\n"
        "    (folder / 'half').touch()\n    raise vembed.MachineError('the printer is out of paper')\n"
        "\n@vembed.register_export('picky', obstacle=lambda encoder: f'{encoder.dimension} numbers are too many')\n"
        "def write(encoder, folder, options):\n    return []\n"
    )
    failed = program("--plugins", "failing", "export", bag, "--format", "failing", "--output", "other")
    assert (failed.returncode, "error: the printer is out of paper" in failed.stderr) == (5, True)
    picky = program("--plugins", "failing", "export", bag, "--format", "picky", "--output", "other")
    assert (picky.returncode, "--format picky: 64 numbers are too many" in picky.stderr) == (2, True)
    assert not (place / "other").exists()


def test_options_reach_the_export_format_of_their_name(
    options: Registry, bag: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(EXPORTS, table, dict(getattr(EXPORTS, table)))

    @register_options("export.toy")
    class ToyOptions(AddedOptions):
        """Options of a format."""

        letters: int = option(3, "letters of a line", metavar="N")

        def run(self, options: Any) -> None:
            if options.format != "toy" and self.letters != 3:
                raise ConfigError("--letters is for toys; add --format toy")

    @register_export("toy")
    def write(encoder: Any, folder: Path, options: Any) -> list[str]:
        (folder / "toy").write_text("a" * options.letters)
        return [f"toy: {options.letters} letters"]

    command = partial(COMMANDS.load("export"), program="vembed export")
    assert command([str(bag), "--output", "out", "--letters", "5"]) == 2
    assert "error: --letters is for toys; add --format toy" in capsys.readouterr().err
    assert command([str(bag), "--output", "out", "--format", "toy", "--letters", "5"]) == 0
    assert "\ntoy: 5 letters\n" in capsys.readouterr().out
    assert (place / "out" / "toy").read_text() == "aaaaa"


def test_the_forms_of_the_command_are_those_that_models_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(OUR_FORMS) == {"auto", *FORMS} - {"vembed"}
    monkeypatch.setattr("vembed.models.export_formats.EXPORTS", Registry("export format", {}))
    with pytest.raises(ConfigError, match=r"export format 'transformers' of .* is already that of vembed"):
        register_export("transformers")(lambda encoder, folder, options: [])


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A table of options of its own."""
    table = Registry("options", {})
    monkeypatch.setattr("vembed.entrypoints.options.OPTIONS", table)
    return table


def parsed(*words: str) -> EvaluateOptions:
    return check(EvaluateOptions, parse_words(EvaluateOptions, words, program="vembed evaluate"))


def test_options_of_a_plugin_are_parsed_checked_and_run(
    options: Registry, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    run_recipe("my_options")
    words = ("bm25", "--data", "a", "b", "--output", "out")
    assert parsed(*words).run_added() is None
    assert parsed(*words, "--most-sets", "2").run_added() is None
    with pytest.raises(ConfigError, match="--most-sets 1: there are 2 sets"):
        parsed(*words, "--most-sets", "1").run_added()
    with pytest.raises(ConfigError, match="--most-sets: must be >= 1, got 0"):
        parsed(*words, "--most-sets", "0")
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    assert text.index("--most-sets N") < text.index("--bf16")  # behind the command's own, before those of models
    assert text.index("--both-directions") < text.index("--most-sets N")

    @register_options("evaluate.instead")
    class Instead(AddedOptions):
        """Options that take over."""

        instead: bool = option(False, "do something else", one_of="sets!")

        def run(self, options: Any) -> int | None:
            return 7 if self.instead else None

    assert parsed("bm25", "--instead", "--output", "out").run_added() == 7
    with pytest.raises(SystemExit):
        parsed("bm25", "--instead", "--data", "a", "--output", "out")
    assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed("--help")
    usage = capsys.readouterr()
    assert "(--data SET [SET ...] | --instead)" in " ".join(usage.out.split())


def test_options_that_cannot_be_are_refused(options: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="begins with a command that takes options of plugins: encode, evaluate"):
        register_options("train.mine")

    @register_options("evaluate.taken")
    class Taken(AddedOptions):
        """Options with a name of ours."""

        metric: str = option("", "taken", metavar="M")

    with pytest.raises(SystemExit):
        parsed("bm25", "--data", "a", "--output", "out")
    assert "options evaluate.taken: --metric is already an option of vembed evaluate" in capsys.readouterr().err
    assert "evaluate" in EXTENSIBLE


def test_a_function_encodes_a_corpus_as_this_process_does(bag: Path, clip: Path, balls: Path, place: Path) -> None:
    in_threads = run_recipe("my_workers")["in_threads"]
    spans_seen: list[tuple[int, int]] = []

    def encode(make: Any, documents: Path, spans: Any, side: Any, poll: Any) -> Any:
        spans_seen.extend(spans)
        yield from in_threads(make, documents, spans, side, poll)

    vembed.build_index(bag, place / "corpus.jsonl", place / "here")
    vembed.build_index(bag, place / "corpus.jsonl", place / "there", encode=encode)
    assert [start for start, _ in spans_seen] == [0]
    for name in ("vectors.npy", "ids.jsonl", "index.faiss", "meta.json"):
        assert (place / "here" / name).read_bytes() == (place / "there" / name).read_bytes(), name
    refused = partial(vembed.build_index, clip, balls, place / "pictures", encode=encode)
    with pytest.raises(ConfigError, match=r"^encode encodes texts, and .* has 4 pictures; leave it out"):
        refused()
    with pytest.raises(ConfigError, match=r"^encode and ray both say what encodes"):
        refused(ray="")


STRANGER = {
    "stranger-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: stranger\nVersion: 1.2\n",
    "stranger-1.2.dist-info/entry_points.txt": """[vembed.plugins]
numpy = stranger.exports
arrow = stranger.indexes
evaluate.sets = stranger.options
export.broken = stranger.broken
""",
    "stranger/__init__.py": "",
    "stranger/exports.py": recipe("my_exports"),
    "stranger/indexes.py": recipe("my_indexes"),
    "stranger/options.py": recipe("my_options"),
    "stranger/broken.py": "import this_package_is_nowhere\n",
}
"""Files of an installed package of someone else: path -> text."""


@pytest.fixture
def stranger(place: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program beside that package, in an interpreter that finds it by itself."""
    site = place / "site"
    for name, text in STRANGER.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (str(site), root, os.environ.get("PYTHONPATH"))))

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vembed", *map(str, words)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=place,
            capture_output=True,
            text=True,
        )

    return run


def test_an_installed_package_brings_options_without_any_key(stranger: Any) -> None:
    listed = stranger("evaluate", "--help")
    assert listed.returncode == 0, listed.stderr
    assert "--most-sets N" in listed.stdout
    assert listed.stderr == ""
    words = ("evaluate", "bm25", "--data", "rows.jsonl", "rows.jsonl", "--output", "out")
    refused = stranger(*words, "--most-sets", 1)
    assert (refused.returncode, refused.stderr) == (2, "error: --most-sets 1: there are 2 sets\n")
    warned = stranger("export", "--help")
    assert warned.returncode == 0
    assert "warning: export.broken is of the package stranger 1.2: stranger.broken can't be imported" in warned.stderr


@pytest.mark.slow
def test_an_installed_package_brings_formats_of_exports_and_indexes(stranger: Any, bag: Path, place: Path) -> None:
    exported = stranger("export", bag, "--format", "numpy", "--output", "out")
    assert exported.returncode == 0, exported.stderr
    assert (place / "out" / "samples.npz").is_file()
    words = ("encode", bag, "--data", "corpus.jsonl", "--output", "index.arrow", "--format", "arrow")
    encoded = stranger(*words)
    assert encoded.returncode == 0, encoded.stderr
    assert hits(stranger("--plugins", "stranger.indexes", "search", "index.arrow", "apple tree", "--json"))


def test_our_own_plugins_stand_in_the_tables_of_the_doors() -> None:
    assert EXPORTS.names()[:1] == ("onnx",)
    assert INDEX_FORMATS.names()[:2] == ("parquet", "lancedb")
    assert OPTIONS.names()[:2] == ("export.onnx", "evaluate.mteb")
    for table in (EXPORTS, INDEX_FORMATS, OPTIONS):
        assert all(table.load(name) is not None for name in table.names())


def test_the_help_of_a_command_imports_no_torch() -> None:
    code = (
        "import sys; from vembed.registry import COMMANDS\n"
        "for name in COMMANDS.names():\n"
        "    try: COMMANDS.load(name)(['--help'], program='vembed')\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'a help imports torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
