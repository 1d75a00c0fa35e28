"""What a check finds: how bad it is, how often it is there, what to do, and examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Severity: TypeAlias = Literal["error", "warning", "note"]
"""error: training or its verdict would be wrong. warning: worth a look. note: a fact that explains results."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

MOST_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of thing that was found."""

    kind: str  # for programs, such as "leaked_queries"
    severity: Severity
    count: int
    one: str  # after the count of one: "pair that repeats an earlier pair"
    many: str  # after any other count
    advice: str  # why it matters, and what to do
    heads: tuple[str, ...] = ()  # of the examples' columns
    examples: Sequence[tuple[str, ...]] = ()
    of: int = 0  # what the count is out of; 0 where that says nothing

    @property
    def title(self) -> str:
        """What there is so many of."""
        return self.one if self.count == 1 else self.many

    @property
    def share(self) -> str:
        """The count as a share, for people."""
        if not self.of:
            return ""
        percent = 100 * self.count / self.of
        return f"{percent:.1f}%" if percent >= 0.1 else "< 0.1%"

    def document(self) -> dict[str, Any]:
        """Return the finding for programs."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "count": self.count,
            "of": self.of or None,
            "title": self.title,
            "advice": self.advice,
            "examples": [dict(zip(self.heads, example, strict=True)) for example in self.examples],
        }


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by severity; `check_data` looks for what spoils a result most first, and that order stays."""
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))


def alike_text(similarity: float, *, equal: bool) -> str:
    """Return how alike two texts are; 100% says that they are equal."""
    return "100%" if equal else f"{min(99, round(100 * similarity))}%"
