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
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.models.encoder import Encoder
from vembed.models.towers import Tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side

CONFIG_FILE = "vembed_ngram_bag.json"
WEIGHTS_FILE = "model.safetensors"

_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+")


@dataclass(frozen=True, slots=True)
class NgramBagConfig:
    """Shape of a bag.

    Attributes:
        dimension: Embedding dim.
        buckets: Rows of the table; hashes collide beyond it.
        max_words: Words of a text that count; the rest is cut.
        shortest: Shortest character n-gram.
        longest: Longest character n-gram.
    """

    dimension: int = 256
    buckets: int = 1 << 16
    max_words: int = 256
    shortest: int = 3
    longest: int = 5


class NgramBag(Encoder):
    """The encoder.

    Args:
        config: Its shape.
        name: What it was loaded by.
    """

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
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def save(self, folder: Path) -> None:
        """Write shape and weights; only vembed loads this family."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n", "utf-8")
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in self.state_dict().items()}
        safetensors.torch.save_file(weights, folder / WEIGHTS_FILE)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype) -> NgramBag:
        """Load what `save` wrote."""
        config = NgramBagConfig(**json.loads((folder / CONFIG_FILE).read_text("utf-8")))
        encoder = cls(config, name=str(folder)).to(dtype)
        encoder.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS_FILE))
        return encoder

    def describe(self) -> dict[str, str]:
        """Return its shape."""
        return {
            "buckets": str(self.config.buckets),
            "max_words": str(self.config.max_words),
            "character n-grams": f"{self.config.shortest} to {self.config.longest}",
            "similarity": "cosine",
            **self.training_facts(),
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        return (Tower("text", parts=("table", "weight")),)


def _words(text: str) -> list[str]:
    """Cut a text into lower-case words, compound identifiers into themselves and their parts."""
    words = []
    for match in _WORD.findall(text):
        parts = _PART.findall(match)
        if len(parts) > 1:
            words += [part.lower() for part in parts]
        words.append(match.lower())
    return words
