"""The space of a sweep: the values of `--try`, in a grid or drawn at random."""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from vembed.config.messages import unknown_key
from vembed.config.names import targets
from vembed.config.record import affects
from vembed.config.schema import fields
from vembed.errors import ConfigError
from vembed.redact import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Choice: TypeAlias = "Mapping[str, str]"
"""Key -> value, both as `--config_override` takes them."""

MOST_TRIALS = 1000

LOG_RATIO = 10.0
"""From such a ratio of its ends a range is drawn on a logarithmic scale."""

DIGITS = 3
"""Significant digits of a drawn number: more say nothing, and make names of folders long."""

FIXED = {
    "output_dir": "each trial has a folder of its own; --output names the sweep's",
    "overwrite_output_dir": "a sweep continues with what it has; give another --output to start anew",
    "resume": "a sweep continues with what it has; give another --output to start anew",
    "seeds": "write --try seed=1,2,3",
    "metric_for_best_model": "it is what the trials are compared by",
    "eval_strategy": "it decides which dev results the trials are compared by",
}
"""Keys that can't be tried, and why. So can't those that choose the sets of the evaluation."""

_log = logging.getLogger(__name__)
_SETS = re.compile(r"(val|test|guard)_|(column_mapping|image_root|label_kind|retrieval_mode|skip_invalid_records)$")
_RANGE = re.compile(r"([-+.\deE]+?)\.\.([-+.\deE]+)")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two ends, both included."""

    low: float
    high: float
    whole: bool  # only whole numbers

    @property
    def is_log(self) -> bool:
        """True where it is drawn on a logarithmic scale: its ends lie far apart, and zero isn't between them."""
        return self.low > 0 and self.high / self.low >= LOG_RATIO

    def text(self, value: float) -> str:
        """Return a number of the range as an override takes it."""
        if self.whole:
            return str(round(value))
        # A rounded number may leave the range by its last digit.
        return f"{min(max(float(f'{value:.{DIGITS}g}'), self.low), self.high):.12g}"

    def draw(self, source: random.Random) -> str:
        """Return a number drawn from it."""
        if not self.is_log:
            return self.text(source.uniform(self.low, self.high))
        return self.text(math.exp(source.uniform(math.log(self.low), math.log(self.high))))


Space: TypeAlias = "Mapping[str, tuple[str, ...] | Range]"
"""Key -> its values, or the range that they are drawn from."""


def values_to_check(values: tuple[str, ...] | Range) -> tuple[str, ...]:
    """Return the values to check before anything is trained: all that are listed, or both ends of a range."""
    return (values.text(values.low), values.text(values.high)) if isinstance(values, Range) else values


def parse_tries(words: Sequence[str]) -> Space:
    """Read the words of `--try`, each `key=value,value` or `key=low..high`.

    Raises:
        ConfigError: A line for each word that can't be used.
    """
    space: dict[str, tuple[str, ...] | Range] = {}
    problems = []
    for word in words:
        try:
            key, values = _parse(word)
        except ConfigError as error:
            problems.append(f"--try {shown(word)}: {error}")
            continue
        # By what they set, not by their names: `lr` and `learning_rate` are one key.
        if any({*targets(key)} & {*targets(earlier)} for earlier in space):
            problems.append(f"--try {shown(word)}: {key} is already tried; list all of its values together")
        space[key] = values
    if problems:
        raise ConfigError("\n".join(problems))
    return space


def grid(space: Space) -> list[Choice]:
    """Return every combination of the values, the last key changing fastest.

    Raises:
        ConfigError: A key has a range, or there are too many combinations.
    """
    listed: list[tuple[str, ...]] = []
    for key, values in space.items():
        if isinstance(values, Range):
            raise ConfigError(f"--try {key}: a grid has no values of a range; list them, or draw some with --random N")
        listed.append(values)
    count = math.prod(map(len, listed))
    if count > MOST_TRIALS:
        raise ConfigError(f"--try asks for {count:,} trials, more than {MOST_TRIALS:,}; draw some with --random N")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*listed)]


def drawn(space: Space, count: int, seed: int) -> list[Choice]:
    """Return different combinations drawn at random, the same for the same seed; all there are, where that is fewer."""
    has_range = any(isinstance(values, Range) for values in space.values())
    if not has_range and math.prod(len(values_to_check(values)) for values in space.values()) <= count:
        choices = grid(space)
    else:
        source = random.Random(seed)  # noqa: S311 - nothing here is a secret
        distinct: dict[tuple[str, ...], Choice] = {}
        for _ in range(100 * count):  # of a small space most draws are repeated ones
            choice = {
                key: values.draw(source) if isinstance(values, Range) else source.choice(values)
                for key, values in space.items()
            }
            distinct.setdefault(tuple(choice.values()), choice)
            if len(distinct) == count:
                break
        choices = list(distinct.values())
    if len(choices) < count:
        _log.warning("--random %d: there are only %d different combinations", count, len(choices))
    return choices


def corners(space: Space) -> Iterator[Choice]:
    """Yield combinations in which each value stands once: what can be checked of values that aren't drawn yet."""
    checked = {key: values_to_check(values) for key, values in space.items()}
    for number in range(max(map(len, checked.values()))):
        yield {key: values[min(number, len(values) - 1)] for key, values in checked.items()}


def _parse(word: str) -> tuple[str, tuple[str, ...] | Range]:
    """Read a word of `--try`: its key, and the values or the range."""
    key, equals, text = (part.strip() for part in word.partition("="))
    if not equals or not key:
        raise ConfigError("write KEY=VALUE,VALUE, such as learning_rate=1e-5,2e-5")
    # Refused in the order of what helps most: a misspelt key first, then one that can't be tried at all.
    name = key.partition(".")[0]
    for target in targets(name):
        if target not in fields():
            raise ConfigError(unknown_key(name))
        if target in FIXED:
            raise ConfigError(f"{target} can't be tried: {FIXED[target]}")
        if _SETS.match(target):
            raise ConfigError(f"{target} can't be tried: trials are compared on the same sets")
        if affects(target) != "result":
            raise ConfigError(f"{target} decides nothing about the result")
    if (ends := _RANGE.fullmatch(text)) is not None:
        low, high = ends.groups()
        try:
            first, last = float(low), float(high)
        except ValueError as error:
            raise ConfigError("a range is two numbers, such as 1e-6..1e-4") from error
        if not (math.isfinite(first) and math.isfinite(last) and first < last):
            raise ConfigError("a range is two numbers, the smaller one first, such as 1e-6..1e-4")
        # 1..5 of a key that takes any number is a range of fractions. The type of a part of a mapping isn't known.
        has_fractions = any(
            target in fields() and "float" in str(fields()[target].annotation) for target in targets(key)
        )
        is_whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high))
        return key, Range(first, last, is_whole and not has_fractions)
    values = _split(text)
    if not all(values):
        raise ConfigError("a value is missing beside a comma; write '' for an empty text and null for none")
    if len(set(values)) < len(values):
        raise ConfigError("a value is listed twice")
    return key, tuple(values)


def _split(text: str) -> list[str]:
    """Split at the commas that stand outside of quotes and brackets."""
    # A value may be a YAML list or mapping, or a quoted text with commas; a quote counts at the start of a value only,
    # as an apostrophe inside a prompt is a letter.
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not parts[-1].strip():
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
