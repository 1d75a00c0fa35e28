"""The line that ends a run, and its parts on the page: no name of a set may break them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.pages import result, sample

from vembed.evaluation.judge import SetOutcome, headline, interval_text, judged
from vembed.evaluation.report.run_report import build_page
from vembed.pages.page import Facts, VerdictBlock

BEFORE = {f"q{number}": 0.9 - number / 100 for number in range(20)}
AFTER = {query: value / 2 for query, value in BEFORE.items()}


def forgotten(task: str) -> SetOutcome:
    """A guard set on which the model lost."""
    before, after = (replace(result(name, values), task=task) for name, values in (("a", BEFORE), ("b", AFTER)))
    return SetOutcome.of("guard", before, after, "ndcg@10")


@pytest.mark.parametrize("task", ["old/test", "old(v2).jsonl", "a: b (c), d"])
def test_a_forgotten_set_follows_the_interval_whatever_it_is_called(task: str) -> None:
    first = SetOutcome.of("test", sample().baseline, sample().final, "ndcg@10")
    report = sample(sets=(first, forgotten(task)))
    decided = report.verdict
    (block,) = (block for block in build_page(report).head if isinstance(block, VerdictBlock))
    assert block.sentence == headline(decided, report.sets) == f"{decided.sentence}; forgets on {task}"
    assert block.interval == f"{interval_text(decided.word, decided.comparison)}; forgets on {task}"
    assert block.interval.startswith("95% interval ")


def test_the_head_of_a_report_over_several_test_sets_says_so() -> None:
    forgets = forgotten("old/test")
    second = SetOutcome.of("test", forgets.final, forgets.final, "ndcg@10")
    for others, suffix, label in ((0, "", "Queries"), (2, " and 2 other test sets", "Queries of the first set")):
        report = sample()
        first = SetOutcome.of("test", report.baseline, report.final, "ndcg@10")
        page = build_page(sample(sets=(first, *[second] * others, forgets)))
        (facts,) = (dict(block.pairs) for block in page.head if isinstance(block, Facts))
        assert facts["Evaluated on"] == f"{report.task.name}{suffix}"
        assert label in facts


def test_the_line_of_a_set_has_its_numbers_once_and_its_word_last() -> None:
    outcome = forgotten("a: b")
    numbers = outcome.verdict.sentence.removeprefix("forgets: ")
    assert (outcome.word, outcome.line) == ("forgets", f"a: b: {numbers}: forgets")


def test_a_bound_that_decides_never_reads_as_zero() -> None:
    comparison = replace(sample().verdict.comparison, low=1e-9, high=0.2, difference=0.1)
    assert "interval +0.000000001 to" in judged(comparison).sentence
    noise = judged(replace(comparison, low=-1e-9))
    assert noise.word == "within noise"
    assert "interval +0.000 to +0.200" in noise.sentence
