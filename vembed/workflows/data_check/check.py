"""Check a data set: read it, look for everything that is wrong, and say what it is like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.errors import ExitCode
from vembed.text import plural
from vembed.workflows.data_check.contradictions import contradictions
from vembed.workflows.data_check.duplicates import exact_duplicates, near_duplicates
from vembed.workflows.data_check.findings import Finding, worst_first
from vembed.workflows.data_check.leaks import leaks
from vembed.workflows.data_check.pictures import check_pictures
from vembed.workflows.data_check.profile import odd_texts, profile_of
from vembed.workflows.data_check.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.data.splits import SourceOptions
    from vembed.vectors.encode import ItemEncoder
    from vembed.workflows.data_check.profile import Profile


@dataclass(frozen=True, eq=False)
class DataCheck:
    """What was found."""

    source: Source
    findings: Sequence[Finding]  # the worst first
    profile: Profile
    notes: Sequence[str]  # of reading, and of what could not be checked

    def count(self, severity: str) -> int:
        """Return how many kinds of findings of a severity there are."""
        return sum(each.severity == severity for each in self.findings)

    def exit_code(self, *, strict: bool) -> ExitCode:
        """Return `DATA` where there are errors, or with `strict` warnings; else `OK`."""
        return ExitCode.DATA if self.count("error") or (strict and self.count("warning")) else ExitCode.OK


def check_data(
    path: str,
    options: SourceOptions,
    against: Mapping[str, SourceOptions],
    folder: Path,
    encode: ItemEncoder | None = None,
) -> DataCheck:
    """Check the data that a path names.

    Args:
        against: Evaluation data by path, whose queries and documents must not be in the data.
        folder: Gets what doesn't fit memory: rows and vectors; the caller removes it.
        encode: Counts tokens, and looks for unlabelled answers.

    Raises:
        VembedError: No row can be read, or the model doesn't take them.
    """
    (folder / "data").mkdir()
    source = Source.read(path, options, folder / "data")
    notes, findings = list(source.notes), broken_rows(source)
    for number, (name, test_options) in enumerate(against.items()):
        (folder / f"against-{number}").mkdir()
        label = f"{name} ({test_options.split})" if test_options.split else name
        test = Source.read(name, test_options, folder / f"against-{number}", label)
        notes += [f"{label}: {note}" for note in test.notes]
        leaked, left_out = leaks(source, test)
        notes += left_out
        if not leaked and not left_out:
            sizes = plural(len(test.queries), "query", "queries"), plural(len(test.positives), "answer")
            notes.append(f"{label}: none of its {sizes[0]} and {sizes[1]} is in the training data.")
        findings += [*broken_rows(test), *leaked]
    findings += [*contradictions(source), *check_pictures(source, options.image_limits)]
    tokens, texts = None, odd_texts(source)
    if encode is not None:
        from vembed.workflows.data_check.with_model import false_negatives, token_lengths  # brings torch

        tokens, cut = token_lengths(source, encode)
        texts = [each for each in texts if each.kind != "long_texts"] + cut
        if source.table.has_classes:
            notes.append("Rows have classes: unlabelled answers are not looked for among them.")
        else:
            findings += false_negatives(source, encode, folder)
    findings += [*near_duplicates(source, "query"), *near_duplicates(source, "positives")]
    findings += [*exact_duplicates(source), *texts]
    return DataCheck(source, worst_first(findings), profile_of(source, tokens), notes)


def broken_rows(source: Source) -> list[Finding]:
    """Say what kept rows from being read."""
    problems = source.problems
    if not problems.count:
        return []
    examples = [
        (f"{kind.size:,}", column, where, reason)
        for (column, _), kind in sorted(problems.kinds.items(), key=lambda each: -each[1].size)
        for where, reason in kind.first
    ]
    return [
        Finding(
            "broken_rows",
            "error",
            problems.count,
            f"row of {source.name} that can't be used",
            f"rows of {source.name} that can't be used",
            "Training refuses the data for them; skip_invalid_records: true drops up to max_invalid_records of them, "
            "but none with a path that leads out of the data.",
            ("Rows alike", "Column", "Row", "Why"),
            examples[:50],
            problems.count + len(source.table),
        )
    ]
