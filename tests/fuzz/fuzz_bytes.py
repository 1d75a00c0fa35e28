"""Files bent at random places (bytes turned over, cut, doubled, put in), and what a refusal of them may say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KINDS = ("flip", "cut", "double", "insert", "overwrite", "truncate", "number")


@st.composite
def bent(draw: st.DrawFn, files: Sequence[bytes], tokens: Iterable[bytes] = ()) -> bytes:
    """Draw one of some files with up to six places bent.

    Args:
        tokens: What may be put in beside random bytes.
    """
    data = bytearray(draw(st.sampled_from(files)))
    payloads = st.binary(max_size=12) | st.sampled_from([b"\0", b"\xff" * 8, *tokens])
    for kind in draw(st.lists(st.sampled_from(_KINDS), max_size=6)):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, min(64, len(data) - at)))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + size]
        elif kind == "double":
            data[at:at] = data[at : at + size] * draw(st.integers(1, 50))
        elif kind == "insert":
            data[at:at] = draw(payloads)
        elif kind == "overwrite":
            payload = draw(payloads)
            data[at : at + len(payload)] = payload
        elif kind == "truncate":
            del data[at:]
        elif kind == "number":  # what a size or an offset may become
            width, order = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from(["little", "big"]))
            number = draw(st.sampled_from([0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**63]) | st.integers(0, 2**64 - 1))
            data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, order)
    return bytes(data)


def check_message(error: Exception) -> None:
    """Check that a message steers no terminal and is of a length that people read."""
    message = str(error)
    assert message
    assert not set(message) & {*map(chr, range(9)), *map(chr, range(11, 32)), *map(chr, range(127, 160)), "\u202e"}
    assert not any("\ud800" <= character <= "\udfff" for character in message)
    assert len(message) < 120_000
