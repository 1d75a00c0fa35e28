"""The garbage collector stays away while a process starts, and comes back."""

import gc
from pathlib import Path
from typing import Any

import pytest

import vembed
from vembed import collector_paused
from vembed.models.tables import NgramBag


@collector_paused()
def _fail() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled(), "the inner one has not switched it on"
    raise KeyError


def test_it_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError):
        _fail()
    assert gc.isenabled()


def test_it_stays_away_while_a_model_is_loaded(bag: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load = NgramBag.load

    def watched(*arguments: Any) -> NgramBag:
        seen.append(gc.isenabled())
        return load(*arguments)

    monkeypatch.setattr(NgramBag, "load", watched)
    vembed.load(bag)
    assert seen == [False]
    assert gc.isenabled()
