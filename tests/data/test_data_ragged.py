"""Ragged rows, of numbers and of further dimensions: packing, taking, joining and padding against lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vembed.batch import Features, Ragged, modality_words


def rows_of(shape: tuple[int, ...], lengths: tuple[int, ...] = (2, 0, 3, 1)) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, *shape)).astype(np.float32) for length in lengths]


def unpacked(ragged: Ragged) -> list[Any]:
    return [ragged.values[start:stop] for start, stop in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_rows_of_any_shape_are_packed_taken_joined_and_padded(shape: tuple[int, ...]) -> None:
    rows = rows_of(shape)
    ragged = Ragged.from_rows(rows, np.float32)
    assert ragged.values.shape == (6, *shape)
    assert ragged.lengths.tolist() == [2, 0, 3, 1]
    taken = ragged.take(np.array([3, 1, 0, 3]))
    joined = Ragged.concat([ragged, taken])
    for found, wanted in (
        (ragged, rows),
        (taken, [rows[i] for i in (3, 1, 0, 3)]),
        (joined, [*rows, *unpacked(taken)]),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(unpacked(found), wanted, strict=True))
    rectangle = ragged.padded(5, -1)
    assert rectangle.shape == (4, 5, *shape)
    for row, padded in zip(rows, rectangle, strict=True):
        assert np.array_equal(padded[: len(row)], row)
        assert (padded[len(row) :] == -1).all()


def test_rows_may_be_plain_lists() -> None:
    assert Ragged.from_rows([[1, 2], [], [3]]).values.tolist() == [1, 2, 3]
    assert Ragged.from_rows([[], [[1, 2], [3, 4]]]).values.tolist() == [[1, 2], [3, 4]]


def test_no_rows_and_empty_rows_are_fine() -> None:
    assert Ragged.from_rows([]).lengths.tolist() == []
    empty = Ragged.from_rows([np.zeros((0, 3)), np.zeros((0, 3))])
    assert empty.values.shape == (0, 3)
    full = Ragged.from_rows([np.ones((2, 3))])
    assert Ragged.concat([Ragged.from_rows([[]]), full]).values.shape == (2, 3)
    assert Ragged.concat([empty, empty]).lengths.tolist() == [0] * 4


def test_features_take_and_join_ragged_columns_of_any_shape() -> None:
    columns = {"patches": Ragged.from_rows(rows_of((4,)), np.float32), "ids": Ragged.from_rows(rows_of(()), np.float32)}
    features = Features(columns, columns["ids"].lengths)
    both = Features.concat([features, features.take(np.array([2]))])
    assert both.columns["patches"].values.shape == (9, 4)
    assert both.columns["patches"].lengths.tolist() == both.lengths.tolist() == [2, 0, 3, 1, 3]


def test_modalities_have_one_name_in_sentences() -> None:
    assert modality_words({"text", "image"}) == "pictures and texts"
    assert modality_words(["image+text"]) == "pictures with a text"
