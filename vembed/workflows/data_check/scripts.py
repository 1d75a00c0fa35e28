"""What a text is written in, by Unicode block: no guess at the language, which three words of a query don't tell."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from itertools import islice

NO_LETTERS, OTHER, HAN, KANA = "no letters", "other", "Han", "Japanese"

_BLOCKS: tuple[tuple[int, str], ...] = (
    (0x0041, "Latin"), (0x0370, "Greek"), (0x0400, "Cyrillic"), (0x0530, "Armenian"), (0x0590, "Hebrew"),
    (0x0600, "Arabic"), (0x0780, OTHER), (0x0900, "Devanagari"), (0x0980, "Bengali"), (0x0A00, "Gurmukhi"),
    (0x0A80, "Gujarati"), (0x0B00, OTHER), (0x0B80, "Tamil"), (0x0C00, "Telugu"), (0x0C80, "Kannada"),
    (0x0D00, "Malayalam"), (0x0D80, "Sinhala"), (0x0E00, "Thai"), (0x0E80, "Lao"), (0x0F00, "Tibetan"),
    (0x1000, "Myanmar"), (0x10A0, "Georgian"), (0x1100, "Hangul"), (0x1200, "Ethiopic"), (0x1380, OTHER),
    (0x1780, "Khmer"), (0x1800, OTHER), (0x1E00, "Latin"), (0x1F00, "Greek"), (0x2000, OTHER), (0x2C60, "Latin"),
    (0x2C80, OTHER), (0x2DE0, "Cyrillic"), (0x2E00, OTHER), (0x2E80, HAN), (0x3040, KANA), (0x3100, HAN),
    (0x3130, "Hangul"), (0x3190, HAN), (0x31F0, KANA), (0x3200, HAN), (0xA000, OTHER), (0xA640, "Cyrillic"),
    (0xA6A0, OTHER), (0xA720, "Latin"), (0xA800, OTHER), (0xAC00, "Hangul"), (0xD7B0, OTHER), (0xF900, HAN),
    (0xFB00, "Latin"), (0xFB13, "Armenian"), (0xFB1D, "Hebrew"), (0xFB50, "Arabic"), (0xFE00, OTHER),
    (0xFE70, "Arabic"), (0xFF00, "Latin"), (0xFF66, KANA), (0xFFA0, "Hangul"), (0xFFE0, OTHER), (0x20000, HAN),
    (0x32000, OTHER),
)  # fmt: skip
_STARTS = [start for start, _ in _BLOCKS]

SCRIPTS: tuple[str, ...] = (*dict.fromkeys(name for _, name in _BLOCKS), NO_LETTERS)

MOST_LETTERS = 200
"""Letters of a text that are looked at."""

_ASCII_LETTER = re.compile("[A-Za-z]")
_SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def script_of(text: str) -> int:
    """Return the place in `SCRIPTS` of the script of most letters; kanji among kana are Japanese."""
    if text.isascii():
        return SCRIPTS.index("Latin" if _ASCII_LETTER.search(text) else NO_LETTERS)
    letters = islice((character for character in text if character.isalpha()), MOST_LETTERS)
    counts = Counter(_BLOCKS[bisect_right(_STARTS, ord(letter)) - 1][1] for letter in letters)
    if not counts:
        return SCRIPTS.index(NO_LETTERS)
    if KANA in counts:
        counts[KANA] += counts.pop(HAN, 0)
    return SCRIPTS.index(max(counts, key=counts.__getitem__))


def num_words(text: str) -> int:
    """Count words; where scripts put no spaces between words, characters."""
    if text.isascii():
        return len(text.split())
    spaceless = len(_SPACELESS.findall(text))
    return spaceless + len(_SPACELESS.sub(" ", text).split())
