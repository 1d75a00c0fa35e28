"""A bag of hashed n-grams: the smallest encoder that learns to retrieve, trained from scratch in seconds.

A text is cut into words (identifiers also at underscores and capitals); each word gives itself, its pair with the next
word and its character n-grams. Their hashes index one table; the mean of the rows, weighted by a learned weight for
each n-gram, is the embedding. No tokenizer has to be trained, no vocabulary kept.

Source: subword hashing as in Bojanowski et al., 2017 (fastText); learned n-gram weights take the place of tf-idf.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.models.checked_files import read_settings
from vembed.models.encoder import About, Encoder
from vembed.models.hub import save_weights
from vembed.models.plannable import ROWS, Tower, TowerInputs
from vembed.models.pooling import unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.models.hub import ModelFiles

CONFIG_FILE = "vembed_ngram_bag.json"

Size = Annotated[int, Field(ge=1, le=1 << 24)]
Characters = Annotated[int, Field(ge=1, le=64)]

SAMPLE_GRAMS = 7
"""N-grams of each row in the run that the plan measures."""

_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+")


@dataclass(frozen=True, slots=True)
class NgramBagConfig:
    """Shape of a bag."""

    dimension: Size = 256
    buckets: Size = 1 << 16  # rows of the table; hashes collide beyond it
    max_words: Size = 256  # words of a text that count; the rest is cut
    shortest: Characters = 3  # characters of the shortest n-gram
    longest: Characters = 5


class NgramBag(Encoder):
    """The encoder."""

    about = About(
        models="A bag of character n-grams, from scratch",
        decides="builtin:ngram-bag",
        pooling="mean of the n-grams",
        prompts="none",
        trainable="all",
        writes="vembed",
    )
    builtin = "ngram-bag"
    marker = CONFIG_FILE

    def __init__(self, config: NgramBagConfig, *, name: str = "builtin:ngram-bag") -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.dimension = config.dimension
        self.max_length = config.max_words
        self.table = nn.Embedding(config.buckets, config.dimension)
        self.weight = nn.Embedding(config.buckets, 1)
        nn.init.normal_(self.table.weight, std=config.dimension**-0.5)
        nn.init.zeros_(self.weight.weight)
        # One cache for each encoder: the grams of a word are asked for in every text that holds it.
        self._grams_of = functools.lru_cache(maxsize=200_000)(self._word_grams)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Hash the n-grams of texts; both sides are read alike."""
        rows, num_truncated = [], 0
        for text in texts_of(items):
            words = _words(text)
            num_truncated += len(words) > self.config.max_words
            rows.append(self._text_grams(words[: self.config.max_words]))
        grams = Ragged.from_rows(rows)
        return Features({"grams": grams}, grams.lengths, num_truncated=num_truncated)

    def _text_grams(self, words: list[str]) -> NDArray[np.int32]:
        """Return the buckets of a text's n-grams; a text without any word has the bucket of the empty one."""
        if not words:
            return np.array([self._bucket("")], dtype=np.int32)
        pairs = [self._bucket(f"{first} {second}") for first, second in itertools.pairwise(words)]
        return np.concatenate([*(self._grams_of(word) for word in words), np.array(pairs, dtype=np.int32)])

    def _word_grams(self, word: str) -> NDArray[np.int32]:
        marked = f"<{word}>"
        grams = [marked]
        for size in range(self.config.shortest, self.config.longest + 1):
            grams += [marked[start : start + size] for start in range(len(marked) - size + 1)]
        return np.array([self._bucket(gram) for gram in dict.fromkeys(grams)], dtype=np.int32)

    def _bucket(self, gram: str) -> int:
        return zlib.crc32(gram.encode()) % self.config.buckets

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Pack the rows one after the other: a bag needs no padding."""
        grams = features.columns["grams"].take(rows)
        return {
            "grams": torch.from_numpy(grams.values).long(),
            "offsets": torch.from_numpy(grams.offsets[:-1]),
            "rows": torch.from_numpy(np.repeat(np.arange(len(rows)), grams.lengths)),
        }

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the weighted mean of each row's n-grams, of unit length."""
        grams, offsets, rows = inputs["grams"], inputs["offsets"], inputs["rows"]
        weights = self.weight(grams).squeeze(-1).exp()
        totals = weights.new_zeros(len(offsets)).index_add(0, rows, weights)
        x = F.embedding_bag(
            grams, self.table.weight, offsets, mode="sum", per_sample_weights=(weights / totals[rows]).to(weights.dtype)
        )
        return unit(x)

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> NgramBag:  # noqa: ARG003
        """Load what `save` wrote, or build a new one."""
        folder = files.folder
        config = NgramBagConfig() if folder is None else read_settings(folder / CONFIG_FILE, NgramBagConfig)
        return files.load_module(lambda: cls(config, name=files.name))

    def save(self, folder: Path) -> None:
        """Write shape and weights; only vembed loads this family."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n", "utf-8")
        save_weights(self, folder)

    def facts(self) -> dict[str, str]:
        """Return its shape."""
        return {
            "buckets": str(self.config.buckets),
            "max_words": str(self.config.max_words),
            "character n-grams": f"{self.config.shortest} to {self.config.longest}",
            "similarity": "cosine",
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        return (Tower("text", parts=("table", "weight")),)

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return rows of n-grams; there is no limit to them."""
        return (TowerInputs("text", None, SAMPLE_GRAMS, fixed=False, make=lambda: grams_without_values(SAMPLE_GRAMS)),)

    @property
    def longest_item(self) -> int | None:
        """None: what is limited is the number of words."""
        return None

    def activation_values(self) -> float:
        """Return what an n-gram keeps in values of 4 bytes: four indices of 8 bytes, a weight and its share."""
        return 10.0


def _words(text: str) -> list[str]:
    """Cut a text into lower-case words, compound identifiers into themselves and their parts."""
    words = []
    for match in _WORD.findall(text):
        parts = _PART.findall(match)
        if len(parts) > 1:
            words += [part.lower() for part in parts]
        words.append(match.lower())
    return words


def grams_without_values(count: int) -> dict[str, Tensor]:
    """Return the inputs of a call of rows of `count` n-grams each, on the meta device."""
    grams = torch.empty(ROWS * count, dtype=torch.long, device="meta")
    return {"grams": grams, "offsets": torch.empty(ROWS, dtype=torch.long, device="meta"), "rows": grams}
