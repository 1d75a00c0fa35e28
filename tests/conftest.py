"""What all tests share: real data where there is some, one thread, no network."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool

os.environ["OMP_NUM_THREADS"] = "1"  # bit-equality holds for one thread count, in this process and its children
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and what is tested inherits that


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole commands first: at the end only short tests are left to share out."""
    items.sort(key=lambda item: "entrypoints" not in item.path.parts)


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

    from vembed.models.ngram_bag import NgramBag, NgramBagConfig

    folder = tmp_path_factory.mktemp("bag") / "bag"
    torch.manual_seed(0)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16)).save(folder)
    return folder


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Leave the drawings out of reports: they take longer than a small run, and tests/evaluation makes them."""
    from markupsafe import Markup

    from vembed.evaluation.report import charts

    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curve", "draw_histogram", "draw_recall", "draw_scores", "draw_time_split"):
            assert hasattr(charts, name)
            patch.setattr(charts, name, lambda *_, **__: Markup("<svg></svg>"))
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Give two gloo processes."""
    pool = RankPool(2)
    yield pool
    pool.close()
