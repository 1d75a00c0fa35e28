"""A checkout that runs without being installed: `PYTHONPATH=. python run.py`, as on a GPU machine without a network."""

import importlib.metadata

import pytest

import vembed
from vembed.evaluation.card_facts import written_with
from vembed.training.finish import package_versions


def test_the_versions_of_a_result_need_no_installed_vembed(monkeypatch: pytest.MonkeyPatch) -> None:
    from_name = importlib.metadata.Distribution.from_name

    def without_vembed(name: str) -> importlib.metadata.Distribution:
        if name == "vembed":
            raise importlib.metadata.PackageNotFoundError(name)
        return from_name(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", without_vembed)
    assert package_versions()["vembed"] == dict(written_with())["vembed"] == vembed.__version__
