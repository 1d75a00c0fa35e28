"""What all tests share: real data where there is some, one thread, no network."""

import gc
import hashlib
import os
import pickle
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.ranks import RankPool

os.environ["OMP_NUM_THREADS"] = "1"  # bit-equality holds for one thread count, in this process and its children
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["VEMBED_CACHE"] = "never"  # nothing outside of the folders of tests is written
gc.set_threshold(20_000, 20, 20)  # each full pass visits the million objects that imports leave
# What is tested inherits what is ignored: nohup ignores the one, and a shell's background the other.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


SAMPLED_ROOMS = (
    "checkpoint", "data", "data_check", "distributed", "encoders", "entrypoints", "evaluation", "gradcache", "losses",
    "mining", "models", "training", "vectors",
)  # fmt: skip
SAMPLED_CASES = defaultdict(lambda: 1, encoders=3)  # of a promise that 14 entries of the registry keep, three entries


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole commands first, and leave most cases of the large tables to the slow tests.

    At the end only short tests are left to share out. Many tests go through tables of families, losses, settings or
    broken inputs: a row of each table, drawn by its name, is enough to see at once that something broke. A row that
    alone sees a grave fault is marked `always`, and runs beside the drawn one.
    """
    items.sort(key=lambda item: "entrypoints" not in item.path.parts)
    cases = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.path.parent.name in SAMPLED_ROOMS and not marks & {"slow", "always"}:
            cases[item.nodeid.partition("[")[0]].append(item)
    for table in cases.values():
        drawn = SAMPLED_CASES[table[0].path.parent.name]
        for item in sorted(table, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())[drawn:]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real data sets, or skip."""
    folder = os.environ.get("VEMBED_TEST_DATA")
    if not folder:
        pytest.skip("VEMBED_TEST_DATA is not set: it names the folder that holds scifact/ and tldr/")
    return Path(folder)


@pytest.fixture(scope="session")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of texts only: builtin:ngram-bag has 17 million parameters."""
    import torch

    from vembed.models.tables import NgramBag, NgramBagConfig

    folder = tmp_path_factory.mktemp("bag") / "bag"
    torch.manual_seed(0)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16)).save(folder)
    return folder


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of texts and pictures that knows the balls."""
    from kit.balls import make_clip

    return make_clip(tmp_path_factory.mktemp("clip") / "clip")


@pytest.fixture(scope="session")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four pictures."""
    from kit.balls import write_balls

    return write_balls(tmp_path_factory.mktemp("balls") / "balls")


@contextmanager
def drawing_by(change: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let reports draw by changed functions: drawings take longer than all else of a report, or than a small run."""
    from vembed.pages import html

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "draw_figure", change("draw_figure", html.draw_figure))
        yield


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Leave the drawings out of reports; tests/evaluation and runs in a process of their own make them."""
    from markupsafe import Markup

    with drawing_by(lambda *_: lambda *_, **__: Markup("<svg></svg>")):
        yield


@pytest.fixture(scope="session")
def drawings() -> dict[Any, Any]:
    """What was drawn, by all that it was made from."""
    return {}


@pytest.fixture(scope="module")
def drawn_once(drawings: dict[Any, Any]) -> Iterator[None]:
    """Draw the same only once."""

    def change(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*words: Any, **options: Any) -> Any:
            key = pickle.dumps((name, words, sorted(options.items())))
            if key not in drawings:
                drawings[key] = draw(*words, **options)
            return drawings[key]

        return remembered

    with drawing_by(change):
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Give two gloo processes."""
    pool = RankPool(2)
    yield pool
    pool.close()
