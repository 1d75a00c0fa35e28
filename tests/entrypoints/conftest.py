"""Shared data and models, and one finished run that several tests look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from command_cases import Outcome, Site, make_site, run_process, write_config

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "hf_canary0123456789secret"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def finished(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run from start to end in a process of its own, with a secret in its environment."""
    folder: Path = tmp_path_factory.mktemp("finished")
    keys = site.keys(max_steps=16, eval_steps=8, learn_temperature=True)
    return run_process(write_config(folder, keys), HF_TOKEN=CANARY, WANDB_API_KEY=CANARY)
