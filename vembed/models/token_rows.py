"""Turn a tokenizer's output into ragged token ids, each checked against the model's embedding table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.batch import Ragged
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import BatchEncoding


def token_rows(rows: Sequence[list[int]], pad_id: int, name: str, num_tokens: int) -> Ragged:
    """Put the token ids of texts into one array; an empty text becomes one padding token, as a row needs one to pool.

    Args:
        rows: Token ids of each text, unpadded.
        pad_id: The padding token.
        name: The model, for the error.
        num_tokens: Rows of its embedding table.

    Raises:
        ConfigError: The table has no row for some id.
    """
    try:
        ids = Ragged.from_rows([row or [pad_id] for row in rows])
        largest = int(ids.values.max(initial=0))
    except OverflowError:  # an id beyond 32 bits
        largest = max(max(row, default=0) for row in rows)
    if largest >= num_tokens:
        raise ConfigError(
            f"{name}: its tokenizer gives token {largest:,}, and its weights have {num_tokens:,} tokens: "
            f"tokenizer.json or tokenizer_config.json is damaged or of another model. Copy the folder again"
        )
    return ids


def count_truncated(encoded: BatchEncoding, lengths: NDArray[np.int64], max_length: int) -> int:
    """Return how many texts a tokenizer truncated.

    Args:
        encoded: What the tokenizer returned.
        lengths: Tokens of each row after truncation, (R,).
        max_length: Tokens that rows were truncated to.
    """
    if encoded.encodings is not None:
        return sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    # A tokenizer in Python doesn't say what it truncated: texts of just the full length count too.
    return int((lengths == max_length).sum())
