"""What the data are like: how long texts are, what they are written in, how rows spread over classes and grades."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.workflows.data_check.duplicates import spread
from vembed.workflows.data_check.findings import Finding
from vembed.workflows.data_check.scripts import NO_LETTERS, SCRIPTS
from vembed.workflows.data_check.spoilt import TRACES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from vembed.workflows.data_check.findings import Severity
    from vembed.workflows.data_check.source import Source

LONG_WORDS = 380
"""English words that fill 512 tokens, where most text encoders cut."""

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
MOST_CLASSES = 20


@dataclass(frozen=True, eq=False)
class Profile:
    """The facts, by side ("queries", "documents") where they differ."""

    unit: str  # of lengths: "words" or "tokens"
    lengths: Mapping[str, NDArray[np.int32]]  # of each distinct text
    scripts: Mapping[str, Mapping[str, int]]  # texts by script, the most frequent first
    classes: Mapping[str, int] = field(default_factory=dict)  # rows by class, the largest first
    num_classes: int = 0
    grades: Mapping[str, int] = field(default_factory=dict)  # pairs by grade, ascending; of many only the quantiles

    def document(self) -> dict[str, Any]:
        """Return the profile for programs."""
        return {
            "lengths": {
                side: {"unit": self.unit, "quantiles": dict(zip(map(str, QUANTILES), _quantiles(each), strict=True))}
                for side, each in self.lengths.items()
            },
            "scripts": self.scripts,
            "classes": {"count": self.num_classes, "rows": self.classes},
            "grades": self.grades,
        }

    def quantiles(self, side: str) -> list[int]:
        """Return least, 5%, median, 95% and greatest length."""
        return _quantiles(self.lengths[side])


def _quantiles(lengths: NDArray[np.int32]) -> list[int]:
    return [int(value) for value in np.quantile(lengths, QUANTILES, method="nearest")]


def profile_of(source: Source, tokens: Mapping[str, NDArray[np.int32]] | None) -> Profile:
    """Return the profile of a data set.

    Args:
        tokens: Lengths in tokens by side, where a model counted them.
    """
    facts = source.facts
    texts = {
        side: numbers[facts.is_text[numbers]]
        for side, numbers in (("queries", source.queries), ("documents", source.documents))
    }
    lengths = {side: facts.words_I[numbers] for side, numbers in texts.items()} if tokens is None else tokens
    scripts = {}
    for side, numbers in texts.items():
        counts = np.bincount(facts.scripts_I[numbers], minlength=len(SCRIPTS)) if len(numbers) else np.zeros(0, int)
        order = [place for place in np.argsort(-counts, kind="stable").tolist() if counts[place]]
        scripts[side] = {SCRIPTS[place]: int(counts[place]) for place in order}
    classes_N, names = source.table.classes
    counts = np.bincount(classes_N[classes_N >= 0], minlength=len(names))
    largest = np.argsort(-counts, kind="stable")[:MOST_CLASSES]
    return Profile(
        "words" if tokens is None else "tokens",
        {side: each for side, each in lengths.items() if len(each)},
        {side: each for side, each in scripts.items() if each},
        {str(names[place]): int(counts[place]) for place in largest.tolist()},
        len(names),
        _grades(source.table.listed[1]),
    )


def _grades(scores: NDArray[np.float64]) -> dict[str, int]:
    values, counts = np.unique(scores, return_counts=True)
    if len(values) > MOST_CLASSES:
        edges = np.linspace(float(values[0]), float(values[-1]), 11)
        counts = np.histogram(scores, edges)[0]
        return {f"{low:.4g} to {high:.4g}": int(n) for low, high, n in zip(edges, edges[1:], counts, strict=False)}
    return {f"{value:g}": int(count) for value, count in zip(values, counts, strict=True)}


def odd_texts(source: Source) -> list[Finding]:
    """Find texts without a letter, with traces of an export, and texts that most encoders would cut."""
    facts, used = source.facts, np.union1d(source.queries, source.documents)
    used = used[facts.is_text[used]]
    long = used[facts.words_I[used] > LONG_WORDS]
    silent = used[facts.scripts_I[used] == SCRIPTS.index(NO_LETTERS)]
    long = long[np.argsort(-facts.words_I[long], kind="stable")]
    found: tuple[tuple[str, Severity, NDArray[np.int64], str, str], ...] = (
        (
            "texts_without_letters",
            "warning",
            silent,
            "without a letter",
            'Numbers and signs alone say little: often a placeholder ("-", "...") or the wrong column.',
        ),
        *(
            (trace.kind, "warning", used[facts.traces_I[used] & (1 << place) > 0], trace.phrase, trace.advice)
            for place, trace in enumerate(TRACES)
        ),
        (
            "long_texts",
            "note",
            long,
            f"of over {LONG_WORDS} words",
            "Most text encoders read 512 tokens and cut the rest. --model MODEL counts what that model cuts.",
        ),
    )
    findings = []
    for kind, severity, numbers, phrase, advice in found:
        shown = numbers[spread(len(numbers))]
        words = [f"{count:,}" for count in facts.words_I[shown].tolist()]
        examples = list(zip(source.places(shown), words, source.said(shown), strict=True))
        one, many = f"text {phrase}", f"texts {phrase}"
        heads = ("Row", "Words", "Text")
        findings.append(Finding(kind, severity, len(numbers), one, many, advice, heads, examples, len(used)))
    return [each for each in findings if each.count]
