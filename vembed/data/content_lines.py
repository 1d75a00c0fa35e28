"""The content of records as lines of JSON, for their fingerprint: whole columns at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def json_texts(texts: Any) -> Any:
    """Return texts of an Arrow array as `json.dumps` writes them; only those that need escapes are Python objects."""
    import pyarrow as pa
    import pyarrow.compute as pc

    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    characters = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    is_plain = (characters - 32 <= 94) & (characters != ord('"')) & (characters != ord("\\"))
    needs = np.diff(np.searchsorted(np.flatnonzero(~is_plain), ends - ends[0])) > 0
    quote = _text('"')
    whole = pc.binary_join_element_wise(quote, texts, quote, _text(""))
    if not needs.any():
        return whole
    mask = pa.array(needs)
    return pc.replace_with_mask(whole, mask, pa.array(map(json.dumps, texts.filter(mask).to_pylist()), whole.type))


def json_lines(items: Any, lists: Sequence[Any], endings: str | Sequence[str]) -> Any:
    """Return [query, positives, negatives, label] of rows as an Arrow array of lines.

    Args:
        items: The JSON of all queries, then of all positives, then of all negatives.
        lists: The positives of each row, and the negatives; their values don't count.
        endings: What the line of each row ends with, after its negatives, or of all.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    start = count = len(lists[0])
    joined = []
    for cells in lists:
        offsets = cells.offsets.to_numpy()
        own = items[start : start + int(offsets[-1])]
        start += len(own)
        if not (np.diff(offsets) == 1).all():
            own = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), own), _text(", "))
        joined.append(own)
    ends = _text(endings) if isinstance(endings, str) else pa.array(endings, pa.large_string())
    parts = (_text("["), items[:count], _text(", ["), joined[0], _text("], ["), joined[1], _text("], "), ends)
    return pc.binary_join_element_wise(*parts, _text(""))


def _text(text: str) -> Any:
    import pyarrow as pa

    return pa.scalar(text, pa.large_string())
