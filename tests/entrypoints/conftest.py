"""Shared data and models, and one finished run that several tests look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Done, Outcome, Site, make_site, run_process, write_config
from search_cases import Page, start_page, write_corpus

import vembed
from vembed.registry import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CANARY = "hf_canary0123456789secret"


@pytest.fixture(scope="module", autouse=True)
def _undrawn(undrawn: None) -> None:
    """Of the runs here those in a process of their own draw."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def finished(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run from start to end in a process of its own, with a secret in its environment."""
    folder: Path = tmp_path_factory.mktemp("finished")
    keys = site.keys(max_steps=16, eval_steps=8, learn_temperature=True)
    return run_process(write_config(folder, keys), HF_TOKEN=CANARY, WANDB_API_KEY=CANARY)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a command in this process: call("encode", MODEL, ...)."""

    def run(command: str, *words: object) -> Done:
        capsys.readouterr()
        try:
            code = COMMANDS.load(command)([str(word) for word in words], program=f"vembed {command}")
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def index(bag: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of texts that the tests only read."""
    folder: Path = tmp_path_factory.mktemp("index") / "index"
    vembed.build_index(bag, corpus, folder)
    return folder


@pytest.fixture(scope="module")
def page(index: Path) -> Iterator[Page]:
    """The page of the texts."""
    started = start_page(index)
    yield started
    started.end()


@pytest.fixture(scope="session")
def picture_index(clip: Path, balls: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of pictures that the tests only read."""
    folder: Path = tmp_path_factory.mktemp("pictures") / "index"
    vembed.build_index(clip, balls, folder)
    return folder


@pytest.fixture(scope="module")
def picture_page(picture_index: Path) -> Iterator[Page]:
    """The page of the pictures."""
    started = start_page(picture_index)
    yield started
    started.end()
