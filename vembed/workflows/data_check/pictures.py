"""Pictures that can't be decoded, and pictures that are too small to show anything."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import pictures_in
from vembed.data.images import ImageError, decode_image
from vembed.data.table import BLOCK_ROWS
from vembed.workflows.data_check.findings import MOST_EXAMPLES, Finding

if TYPE_CHECKING:
    from vembed.batch import ImageLimits, Item
    from vembed.workflows.data_check.source import Source

LEAST_SIDE = 32
"""Pixels of the shorter side below which a picture is tiny: models see 224 and more."""

SECONDS_BETWEEN_LINES = 10.0

_log = logging.getLogger(__name__)


def check_pictures(source: Source, limits: ImageLimits) -> list[Finding]:
    """Decode every picture; their headers were checked when the rows were read."""
    items = source.table.items
    numbers = np.flatnonzero(~source.facts.is_text)
    broken: list[tuple[int, str, str]] = []
    tiny: list[tuple[int, str, str]] = []
    num_pictures, num_broken, num_tiny = len(numbers), 0, 0
    last_line = time.perf_counter()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for start in range(0, len(numbers), BLOCK_ROWS // 8):
            block = numbers[start : start + BLOCK_ROWS // 8]
            verdicts = pool.map(partial(_verdict, limits=limits), items.at(block))
            for number, (reason, size) in zip(block.tolist(), verdicts, strict=True):
                num_broken += bool(reason)
                num_tiny += bool(size)
                for said, examples in ((reason, broken), (size, tiny)):
                    if said and len(examples) < MOST_EXAMPLES:
                        examples.append((number, source.said(np.array([number]))[0], said))
            if time.perf_counter() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.perf_counter()
                _log.info("looked at %d of %d pictures", min(start + len(block), num_pictures), num_pictures)
    found = [
        Finding(
            "broken_pictures",
            "error",
            num_broken,
            "picture that can't be decoded",
            "pictures that can't be decoded",
            "Their headers are fine, their pixels are not; training stops at the first of them. Save them again, or "
            "drop the rows.",
            ("Row", "Picture", "Why"),
            _located(source, broken),
            num_pictures,
        ),
        Finding(
            "tiny_pictures",
            "warning",
            num_tiny,
            f"picture with a side of under {LEAST_SIDE} pixels",
            f"pictures with a side of under {LEAST_SIDE} pixels",
            "Thumbnails, icons and tracking pixels show a model little once they are enlarged. Fetch larger ones, or "
            "drop the rows.",
            ("Row", "Picture", "Pixels"),
            _located(source, tiny),
            num_pictures,
        ),
    ]
    return [each for each in found if each.count]


def _verdict(item: Item, limits: ImageLimits) -> tuple[str, str]:
    """Return why an item's pictures can't be decoded, and the size of one that is tiny; empty where all is well."""
    tiny = ""
    for image in pictures_in([item]):
        try:
            width, height = decode_image(image, limits).size
        except ImageError as error:
            return error.reason, ""
        tiny = f"{width} x {height}" if min(width, height) < LEAST_SIDE else tiny
    return "", tiny


def _located(source: Source, examples: list[tuple[int, str, str]]) -> list[tuple[str, ...]]:
    numbers = np.array([number for number, *_ in examples], dtype=np.int64)
    return [(where, *rest) for where, (_, *rest) in zip(source.places(numbers), examples, strict=True)]
