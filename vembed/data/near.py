"""Find texts that are nearly alike without comparing all of them with all others.

1. A text is normalised (case, spaces and punctuation don't count) and cut into shingles: each run of `GRAM` characters.
2. Its sketch has `BANDS * ROWS` bytes, each of the least hash of its shingles under another order; `ROWS` are a band.
3. Texts that share a band are candidates, and of those with about as many equal bytes as similar texts have, the share
   of shingles that both have (the Jaccard similarity) is computed exactly: what is reported is as alike as it says.

Two texts of similarity s share a band with the probability 1 - (1 - s^ROWS)^BANDS: 99.5% at 0.8, 48% at 0.5, 8% at 0.3.
A byte of both is equal with the probability s, or by chance: s + (1 - s) / 256. Sketches take 40 bytes a text, and
NumPy makes those of a block of texts at once; `datasketch` would loop over texts in Python and hold a Python object for
each of them and each band.
Source: Broder, "On the resemblance and containment of documents", 1997; Leskovec et al., "Mining of Massive Datasets",
chapter 3.
Shape legend: N texts, P pairs, B bands.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vembed.batch import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

GRAM = 4
"""Characters of a shingle: fewer are shared by chance, more are lost with every typo."""

BANDS, ROWS = 10, 4
"""Bands of a sketch and bytes of a band. Four bytes are one uint32, so that a band is compared as one number. More
bands find more pairs and give more candidates to compare; longer ones give fewer of both."""

SIMILAR = 0.8
"""Least share of shingles that nearly equal texts have in common."""

MOST_CHARACTERS = 20_000
"""Characters at the start of a text that are compared: a book's beginning tells it from others."""

LEAST_EQUAL = 24
"""Equal bytes of 40 below which a pair isn't compared: of pairs of similarity 0.8, 1 in 500 has fewer."""

MOST_COMPARED = 500_000
"""Pairs that are compared at most, those with most equal bytes first; each takes about 50 microseconds."""

_BLOCK_PAIRS = 65_536
"""Pairs whose sketches are copied at a time: 2 * 40 bytes a pair."""

_BETWEEN_WORDS = re.compile(r"[\W_]+")
_draw = np.random.default_rng(20_240_611)
# Odd numbers: multiplying by one is invertible modulo 2^32, so it reorders hashes and lets no two fall together. The
# seed is fixed, so that two runs of a check agree.
_WEIGHTS = _draw.integers(0, 2**31, GRAM, dtype=np.uint32) * 2 + 1
_ORDERS = _draw.integers(0, 2**31, BANDS * ROWS, dtype=np.uint32) * 2 + 1


class Alike(NamedTuple):
    """Pairs of texts that are nearly alike, the most alike first."""

    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]
    similarity_P: NDArray[np.float64]
    num_left: int = 0  # pairs of candidates that were not compared

    @property
    def left_out(self) -> str:
        """A sentence about the candidates that were not compared, or nothing."""
        return f" {self.num_left:,} further pairs of candidates were not compared." if self.num_left else ""


def normalised(text: str) -> str:
    """Return a text with case folded and all but letters, their marks and digits as single spaces.

    One without any letter or digit keeps all but its spaces: "?!" and "..." are not the same text.
    """
    between = _BETWEEN_WORDS
    if not text.isascii():
        text, between = unicodedata.normalize("NFKC", text).replace("_", " "), _between_marked_words()
    return between.sub(" ", text.casefold()).strip() or "".join(text.split())


@cache
def _between_marked_words() -> re.Pattern[str]:
    r"""Return what stands between words whose letters have marks, such as the vowel signs of Hindi and Thai.

    In Python's `\w` there are no marks: words would fall apart at them, and those that differ in vowels alone be equal.
    """
    # Without those that choose how a sign is drawn, and without rare scripts from U+10000 on: a set that holds one of
    # these is searched ten times as long.
    codes = (code for code in range(0x300, 0x10000) if not 0xFE00 <= code <= 0xFE0F)
    marks = "".join(chr(code) for code in codes if unicodedata.category(chr(code)) in ("Mn", "Mc"))
    return re.compile(f"[^\\w{marks}]+")


def sketches(texts: Sequence[str]) -> NDArray[np.uint32]:
    """Return the sketches of normalised texts, (B, N), four bytes in a number."""
    if not texts:
        return np.empty((BANDS, 0), dtype=np.uint32)
    # All texts are one array of code points; a shingle's hash is a weighted sum of GRAM of them, made for all positions
    # by GRAM additions of whole arrays. Shingles that would reach into the next text are left out by `at`.
    padded = [_padded(text) for text in texts]
    lengths = np.fromiter(map(len, padded), np.int64, len(padded))
    codes = np.frombuffer("".join(padded).encode("utf-32-le", "replace"), dtype="<u4")
    counts = lengths - GRAM + 1
    at = ranges(np.cumsum(lengths) - lengths, counts)
    grams = np.zeros(len(at), dtype=np.uint32)
    for offset, weight in enumerate(_WEIGHTS):
        grams += codes[at + offset] * weight
    grams = _mixed(grams)
    starts = np.cumsum(counts) - counts
    bands = np.zeros((BANDS, len(texts)), dtype=np.uint32)
    # One pass over all shingles for each of the 40 orders: this is where the time of sketches goes.
    for number, order in enumerate(_ORDERS):
        least = _mixed(np.minimum.reduceat(grams * order, starts))
        bands[number // ROWS] = (bands[number // ROWS] << np.uint32(8)) | (least & np.uint32(0xFF))
    return bands


def alike_within(bands_BN: NDArray[np.uint32], text: Callable[[NDArray[np.int64]], list[str]]) -> Alike:
    """Return pairs of different texts; each text is compared with the first and the next that share a band with it.

    All pairs of a band that n texts share would be n^2 / 2: a phrase that opens 10,000 texts would give 50 million. The
    first and the next are 2n, and link all texts that are alike.

    Args:
        text: Gives the normalised texts at some positions.
    """

    def pairs(order: NDArray[np.int64], first: NDArray[np.int64], starts: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
        follows = ~starts
        return [np.stack([order[first[follows]], order[follows]]), np.stack([order[:-1], order[1:]])[:, follows[1:]]]

    return _compared(_candidates(bands_BN, pairs), bands_BN, text)


def alike_between(
    bands_BN: NDArray[np.uint32], num_first: int, text: Callable[[NDArray[np.int64]], list[str]]
) -> Alike:
    """Return pairs of one of the first texts and one of the others; arguments as of `alike_within`.

    Of the texts that share a band, every one of the others is compared with the first of the first texts, and every one
    of the first texts with the last of the others, which is linear in their number too.
    """

    def pairs(order: NDArray[np.int64], first: NDArray[np.int64], starts: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
        is_other = order >= num_first  # within a run the first texts stand first: the sort is stable
        ends = np.append(np.flatnonzero(starts)[1:], len(order)) - 1
        last = np.repeat(ends, np.diff(np.append(np.flatnonzero(starts), len(order))))
        crosses = ~is_other[first] & is_other[last]
        of_first, of_other = crosses & is_other, crosses & ~is_other
        return [
            np.stack([order[first[of_first]], order[of_first]]),
            np.stack([order[of_other], order[last[of_other]]]),
        ]

    return _compared(_candidates(bands_BN, pairs), bands_BN, text)


def _candidates(
    bands_BN: NDArray[np.uint32],
    pairs: Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]], list[NDArray[np.int64]]],
) -> NDArray[np.int64]:
    """Return pairs of texts that share a band and have `LEAST_EQUAL` equal bytes, (2, P).

    Args:
        pairs: Gets the texts sorted by a band, for each the index of the first text of its run of equal bands, and
            where runs start; returns pairs of (2, P) texts.
    """
    count = bands_BN.shape[1]
    keys_so_far = np.empty(0, dtype=np.int64)  # first * count + second, so that pairs are one sorted array
    for band in bands_BN if count > 1 else ():
        order = np.argsort(band, kind="stable")
        starts = np.append(True, band[order][1:] != band[order][:-1])
        first = np.maximum.accumulate(np.where(starts, np.arange(count), 0))
        keys = np.concatenate([one * count + other for one, other in pairs(order, first, starts)])
        # Counted band by band, before pairs are kept: most candidates share one band by chance and go at once.
        is_alike = _equal_bytes(bands_BN, *np.divmod(keys, count)) >= LEAST_EQUAL
        keys_so_far = np.union1d(keys_so_far, keys[is_alike])
    return np.stack(np.divmod(keys_so_far, max(1, count)))


def _equal_bytes(
    bands_BN: NDArray[np.uint32], first_P: NDArray[np.int64], second_P: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of equal bytes of two sketches, for each pair."""
    equal_P = np.zeros(len(first_P), dtype=np.int64)
    for start in range(0, len(first_P), _BLOCK_PAIRS):
        part = slice(start, start + _BLOCK_PAIRS)
        differ_BP = np.ascontiguousarray(bands_BN[:, first_P[part]] ^ bands_BN[:, second_P[part]])
        equal_P[part] = (differ_BP.view(np.uint8).reshape(BANDS, -1, ROWS) == 0).sum(axis=(0, 2))
    return equal_P


def _compared(
    pairs_2P: NDArray[np.int64], bands_BN: NDArray[np.uint32], text: Callable[[NDArray[np.int64]], list[str]]
) -> Alike:
    """Return the candidates that are alike by the exact Jaccard similarity."""
    num_left = max(0, pairs_2P.shape[1] - MOST_COMPARED)
    if num_left:
        best = np.argsort(-_equal_bytes(bands_BN, *pairs_2P), kind="stable")[:MOST_COMPARED]
        pairs_2P = pairs_2P[:, np.sort(best)]
    first_P, second_P = pairs_2P
    similarity_P = np.zeros(len(first_P))
    for start in range(0, len(first_P), 4096):
        part = slice(start, start + 4096)
        sides = zip(text(first_P[part]), text(second_P[part]), strict=True)
        similarity_P[part] = [jaccard(one, other) for one, other in sides]
    order = np.argsort(-similarity_P, kind="stable")
    order = order[similarity_P[order] >= SIMILAR]
    return Alike(first_P[order], second_P[order], similarity_P[order], num_left)


def jaccard(one: str, other: str) -> float:
    """Return the share of shingles that two normalised texts have in common."""
    ours, theirs = (
        {padded[start : start + GRAM] for start in range(len(padded) - GRAM + 1)}
        for padded in map(_padded, (one, other))
    )
    common = len(ours & theirs)
    return common / (len(ours) + len(theirs) - common)


def _padded(text: str) -> str:
    return f" {text[:MOST_CHARACTERS]} ".ljust(GRAM)


def _mixed(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Spread the bits of hashes: every bit of the input changes half of the bits of the output.

    Source: `lowbias32` of hash-prospector by Chris Wellons.
    """
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x7FEB352D)
    values = (values ^ (values >> np.uint32(15))) * np.uint32(0x846CA68B)
    return values ^ (values >> np.uint32(16))
