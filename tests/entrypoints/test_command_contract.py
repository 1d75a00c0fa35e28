"""What every command promises: help, refusals in words and without a traceback, one writer, the same bytes twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import pytest
from kit.runs import Done, word_pairs, write_rows

from vembed.config.messages import key_schemas
from vembed.distributed.lock import hold_output
from vembed.entrypoints import data
from vembed.entrypoints.options import EXTENSIBLE, Options, added_options, check
from vembed.errors import ConfigError
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.registry import COMMANDS
from vembed.section import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NAMES = sorted(set(COMMANDS.names()) - set(COMMANDS.plugins()))
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "messages.json").read_text("utf-8"))["frozen"]

WRONG_PATH = {
    "init": ("nowhere.jsonl", "-o", "new.yaml"),
    "explain": ("nowhere",),
    "train": ("nowhere.yaml",),
    "plan": ("nowhere.yaml", "--json"),
    "evaluate": ("BAG", "--data", "nowhere.jsonl", "--output", "out"),
    "compare": ("nowhere", "elsewhere", "--output", "out"),
    "mine": ("BAG", "--data", "nowhere.jsonl", "--output", "out.jsonl"),
    "merge": ("BAG", "BAG", "--data", "nowhere.jsonl", "--output", "out"),
    "encode": ("BAG", "--data", "nowhere.jsonl", "--output", "out"),
    "search": ("nowhere", "query"),
    "doctor": ("nowhere.yaml",),
    "export": ("./nowhere", "--output", "out"),
    "push": ("./nowhere", "owner/name", "--dry-run"),
    "data": ("check", "nowhere.jsonl"),
    "sweep": ("nowhere.yaml", "--try", "seed=1,2"),
}
"""Words of each command that name what isn't there; BAG is a model."""

WRITES = {
    "init": (("rows.jsonl", "-o", "OUT.yaml"), "OUT.yaml"),
    "mine": (("BAG", "--data", "rows.jsonl", "--range-max", "20", "--output", "OUT.jsonl"), "OUT.jsonl"),
    "merge": (("BAG", "OTHER", "--weights", "0.25", "0.75", "--output", "OUT"), "OUT"),
    "encode": (("BAG", "--data", "corpus.jsonl", "--output", "OUT.parquet"), "OUT.parquet"),
    "export": (("BAG", "--output", "OUT"), "OUT"),
    "data": (("check", "rows.jsonl", "--json", "OUT.json"), "OUT.json"),
}
"""Words of each command that writes the same bytes again, and the output."""

HOLDS = {**{name: words for name, (words, _) in WRITES.items() if name not in ("init", "data")}, "encode": (
    "BAG", "--data", "corpus.jsonl", "--output", "OUT"), "evaluate": (
    "BAG", "--data", "rows.jsonl", "--output", "OUT"), "train": (
    "config.yaml",), "sweep": ("config.yaml", "--try", "seed=1,2", "--output", "OUT")}  # fmt: skip
"""Words of each command that refuses an output which another one writes."""


@pytest.fixture(scope="module")
def other(bag: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the architecture of `bag`, with other weights."""
    import torch

    folder = tmp_path_factory.mktemp("other") / "bag"
    torch.manual_seed(1)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16)).save(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with rows, a corpus and a configuration."""
    monkeypatch.chdir(tmp_path)
    rows = word_pairs()[:40]
    write_rows(tmp_path / "rows.jsonl", rows)
    write_rows(tmp_path / "corpus.jsonl", [{"_id": str(n), "text": row["positive"]} for n, row in enumerate(rows)])
    keys = {"model_name": "builtin:ngram-bag", "data_path": "rows.jsonl", "output_dir": "OUT", "report_to": "none"}
    (tmp_path / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()), "utf-8")
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], bag: Path, other: Path) -> Callable[..., Done]:
    def run(name: str, *words: str) -> Done:
        capsys.readouterr()
        models = {"BAG": str(bag), "OTHER": str(other)}
        try:
            code = COMMANDS.load(name)([models.get(word, word) for word in words], program=f"vembed {name}")
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def contents(path: Path) -> dict[str, bytes]:
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def sections() -> list[type[Options]]:
    import importlib

    modules = [importlib.import_module(COMMANDS.load(name).__module__) for name in NAMES if name != "data"]
    return [*(module.OPTIONS for module in modules), *(options for options, _ in data.ACTIONS.values())]


class CommandContract:
    """Every command of ours."""

    @pytest.mark.parametrize("name", NAMES)
    def test_help_is_frozen_and_names_every_option(self, name: str) -> None:
        text = "\n".join(GOLDEN[f"help of {name}"]["out"])
        assert GOLDEN[f"help of {name}"]["code"] == 0
        for options in sections():
            if options.__module__ == COMMANDS.load(name).__module__ and name != "data":
                for part in (options, *added_options(options).values()):
                    for field, info in part.fields_in_order().items():
                        flags = facts_of(info).get("flags")
                        named = [f"--{flag}" for flag in flags] if flags else [part.name_of(field)]
                        assert all(word in text for word in named), field

    @pytest.mark.parametrize("name", NAMES)
    def test_an_unknown_option_ends_with_the_usage(self, name: str, call: Callable[..., Done], place: Path) -> None:
        done = call(name, *WRONG_PATH[name], "--no-such-option").fails(2)
        assert done.err.startswith(f"usage: vembed {name}")
        assert "unrecognized arguments: --no-such-option" in done.err
        assert contents(place) == contents(place), "nothing is written"

    @pytest.mark.parametrize("name", NAMES)
    def test_a_path_that_leads_nowhere_is_one_sentence(
        self, name: str, call: Callable[..., Done], place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        before = contents(place)
        done = call(name, *WRONG_PATH[name])
        assert done.code in (2, 3)
        assert done.err.startswith("error: ")
        assert "nowhere" in done.err
        assert "Traceback" not in done.err
        assert contents(place) == before, "nothing is written"

    @pytest.mark.parametrize("name", sorted(HOLDS))
    def test_an_output_that_another_writes_is_refused(self, name: str, call: Callable[..., Done], place: Path) -> None:
        import threading

        words = HOLDS[name]
        output = place / next((word for word in words if word.startswith("OUT")), "OUT")
        is_held, is_done = threading.Event(), threading.Event()

        def hold() -> None:
            with hold_output(output, beside=True), hold_output(output.with_suffix("") if output.suffix else output):
                is_held.set()
                is_done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert is_held.wait(60)
            done = call(name, *words)
        finally:
            is_done.set()
            thread.join()
        assert (done.code, "is written by another thread" in done.err) == (2, True), done.err

    @pytest.mark.parametrize("name", sorted(WRITES))
    def test_two_starts_write_the_same_bytes(self, name: str, call: Callable[..., Done], place: Path) -> None:
        words, output = WRITES[name]
        written = []
        for _ in range(2):
            call(name, *words).ok()
            written.append(contents(place / output))
            for path in place.glob("OUT*"):
                path.rename(path.with_name(f"kept-{len(written)}-{path.name}"))
        assert written[0]
        assert written[0] == written[1]

    @pytest.mark.parametrize("options", sections(), ids=lambda options: options.__name__)
    def test_a_number_below_its_bound_is_refused_by_the_name_of_its_option(self, options: type[Options]) -> None:
        required = {name: "x" for name, info in options.model_fields.items() if info.is_required()}
        given: Mapping[str, Any] = {
            name: [value] if get_origin(options.model_fields[name].annotation) is list else value
            for name, value in required.items()
        }
        given = {name: Path("x") if options.model_fields[name].annotation is Path else given[name] for name in given}
        check(options, given)  # what is required is enough
        for name, info in options.model_fields.items():
            for bound in _lower_bounds(info):
                with pytest.raises(ConfigError) as refused:
                    check(options, {**given, name: bound - 1})
                assert str(refused.value).startswith(f"{options.name_of(name)}: must be "), name
                assert getattr(check(options, {**given, name: bound}), name) == bound


def _lower_bounds(info: Any) -> Sequence[int]:
    """Return the least whole number that a field takes, where it has one."""
    parts = [info, *(part for part in get_args(info.annotation))]
    facts = [fact for part in parts for fact in getattr(part, "metadata", getattr(part, "__metadata__", ()))]
    facts += [fact for each in facts for fact in getattr(each, "metadata", ())]
    return [fact.ge for fact in facts if isinstance(getattr(fact, "ge", None), int)]


class TestCommands(CommandContract):
    """The commands of this repository."""


def test_an_option_that_is_a_key_is_told_how_to_be_written(call: Callable[..., Done]) -> None:
    for name in ("train", "plan", "sweep"):
        done = call(name, "a.yaml", "--learning-rate", "1", *(("--try", "seed=1") if name == "sweep" else ()))
        assert "write --config_override learning_rate=VALUE" in done.err
    assert "learning_rate" in key_schemas()


def test_the_commands_that_take_options_of_plugins_are_those_that_say_so() -> None:
    assert sorted(options.command for options in sections() if options.command) == sorted(EXTENSIBLE)
