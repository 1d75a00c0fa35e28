"""However a model's folder is bent, it is refused by folder, file and cure, or gives the vectors that it gave."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from encoder_cases import CASES
from folder_bends import Bend, ways
from fuzz_bytes import check_message
from fuzz_limits import within_limits
from kit.picture_models import PICTURES

import vembed
from vembed.errors import NonFiniteError, VembedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXTS = ["sea", "The river runs to the sea.", "a list " * 90]
QUICK = ("ngram-bag", "static table, dense", "text bert, prompts, dense")
"""Families of which the default tests bend a few files; `make fuzz` and the slow tests take all."""

OTHERS = (
    "tiny-clip", "text qwen3", "sentence_transformers layer norm", "colbert topk, pooled", "vision dinov2",
    "dual clip", "open_clip clip", "composed bert + dinov2", "patches dinov2, topk", "vision_language qwen3_vl",
    "vision-late qwen3_vl, pooled",
)  # fmt: skip
OPTIONAL = (
    "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json", "vembed_patches.json",
    "vembed_vision_language.json", "vembed_pictures.json", "generation_config.json",
)  # fmt: skip
"""Files without which a folder is that of another model, or takes what is usual."""

BENDS = 50
"""Of each family in the slow tests."""


class Folder:
    """The folder of a small model, and the vectors that it gives."""

    def __init__(self, family: str, root: Path) -> None:
        case = next(case for case in CASES if str(case) == family)
        case.write(root / "written")
        self.whole, self.bent = root / "whole", root / "bent"
        case.load(root / "written", dtype=torch.float32).save(self.whole)
        self.vectors = encoded(self.whole)

    def check(self, bend: Bend) -> str:
        """Load a bent copy; return what came of it.

        Raises:
            AssertionError: It isn't what this file promises.
        """
        folder = bend.copy(self.whole, self.bent)
        error = None
        with within_limits():
            try:
                vectors = encoded(folder)
            except VembedError as caught:
                error = caught
        can_tell = bend.seen and not (bend.kind == "deleted" and Path(bend.file).name in OPTIONAL)
        if error is None:
            assert len(vectors) == len(self.vectors)
            assert not can_tell or all(map(np.array_equal, vectors, self.vectors)), "other vectors"
            return "loaded"
        check_message(error)
        message = str(error)
        if isinstance(error, NonFiniteError):
            assert not can_tell, message
            return "not finite"
        assert error.exit_code == 2, message
        assert str(folder) in message, message
        # Where two files contradict each other, one of them is named.
        names = {path.name for path in self.whole.rglob("*")} | {"vembed_*.json"}
        assert not can_tell or any(name in message for name in names), message
        return "refused"


def encoded(folder: Path) -> list[NDArray[np.float32]]:
    """Return the vectors of each item."""
    model = vembed.load(folder)
    items = [*(TEXTS if "text" in model.takes else ()), *(PICTURES[:2] if "image" in model.takes else ())]
    return model.encode_multi_vector(items, "query")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of the family that a test names."""
    return Folder(request.param, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("folder", QUICK, indirect=True)
def test_a_few_bent_folders(folder: Folder) -> None:
    came = [folder.check(bend) for bend in islice(ways(folder.whole), 24)]
    assert came.count("refused") > len(came) // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "file", "old", "new"),
    [
        ("vision dinov2", "preprocessor_config.json", '"resample": 3', '"resample": {"x": 1}'),
        ("vision dinov2", "preprocessor_config.json", '"height": 32', '"height": 3'),
        ("dual clip", "preprocessor_config.json", '"resample": 3', '"resample": 99'),
        ("dual clip", "tokenizer.json", '"##e": ', '"##e": 2147483648, "x": '),
        ("open_clip clip", "open_clip_config.json", '"preprocess_cfg": {', '"preprocess_cfg": "", "x": {'),
        (
            "text qwen3",
            "config_sentence_transformers.json",
            '"default_prompt_name": null',
            '"default_prompt_name": "x"',
        ),
    ],
    indirect=["folder"],
)
def test_a_value_that_no_library_takes_is_refused_by_its_file(folder: Folder, file: str, old: str, new: str) -> None:
    def write(path: Path) -> None:
        text = path.read_text("utf-8")
        assert old in text, text[:400]
        path.write_text(text.replace(old, new), "utf-8")

    assert folder.check(Bend(file, f"{old} is {new}", write)) == "refused"


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*QUICK, *OTHERS], indirect=True)
def test_every_file_bent_in_many_ways(folder: Folder) -> None:
    seed = int(os.environ.get("VEMBED_FUZZ_SEED", "0"))
    came = [folder.check(bend) for bend in islice(ways(folder.whole, seed), BENDS)]
    assert came.count("refused") > BENDS // 3
