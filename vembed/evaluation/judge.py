"""Judge whether one system retrieves better than another, or whether the difference is noise.

1. Pair the two systems' values of one metric by query, and take the differences.
2. Their mean has a standard error: their standard deviation over the root of the number of queries.
3. The interval is the mean, give or take so many standard errors as Student's t distribution says.
4. Improved when the whole interval lies above zero, worse when it lies below, within noise otherwise.

Pairing matters: queries differ far more in difficulty than systems do in quality, and that part cancels. The interval
speaks of other queries of the same kind; it knows nothing of other training seeds. Simulated with differences as
retrieval has them (many ties, values in 0 to 1), it holds the truth in 94 to 96% of samples of 50 to 1,000 queries;
a percentile bootstrap does in 92 to 94% at 50 queries and in 90% at 20.

The verdict of a run is that of its test set, or of the mean over several (`overall`). A guard set holds what the model
could do before: training should lose nothing on it. Several seeds are judged together by `seeds_verdict`, whose
interval is over other seeds too.
Shape legend: Q queries of a set, S seeds.
Source: Student (1908); Welch (1947) for means over sets; Urbano, Lima & Hanjalic, Statistical Significance Testing in
Information Retrieval (SIGIR 2019), for retrieval metrics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.evaluation.results import EvaluationResult

    BeforeAndAfter: TypeAlias = tuple[EvaluationResult, EvaluationResult]  # a baseline and a candidate on one set

FLOAT_NOISE_DECIMALS = 12
"""Decimals that bounds are rounded to: a sum of differences that cancel leaves 1e-17, which is not an improvement."""

CONFIDENCE = 0.95

LEVEL = 0.05
"""Corrected p-value below which two systems are said to differ."""

VerdictWord: TypeAlias = Literal["improved", "within noise", "worse"]

SetRole: TypeAlias = Literal["test", "dev", "guard"]
"""A dev set stands for the test set where there is none."""

RSUM_METRICS = ("hit@1", "hit@5", "hit@10")
"""R@1, R@5 and R@10 of the literature on captioned pictures: the share of queries that find a right document."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference of two systems in one metric, over the same queries."""

    metric: str  # name of the metric, e.g. "ndcg@10"
    baseline: float  # mean of the baseline
    candidate: float  # mean of the candidate
    difference: float  # mean of candidate minus baseline
    low: float  # lower bound of the interval of the difference
    high: float  # upper bound of the interval of the difference
    num_queries: int  # queries that were paired
    confidence: float  # how often such an interval holds the truth, e.g. 0.95


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison put into one word and one sentence."""

    word: VerdictWord  # "improved", "within noise" or "worse"
    comparison: Comparison  # the numbers behind it
    sentence: str  # the line that ends a run


def verdict(
    baseline: EvaluationResult, candidate: EvaluationResult, metric: str, *, confidence: float = CONFIDENCE
) -> Verdict:
    """Judge whether the candidate is better than the baseline.

    One query is always within noise: nothing says how far another one would lie.

    Args:
        candidate: The later system, evaluated on the same queries.
        confidence: How often such an interval is to hold the truth, between 0 and 1.

    Returns:
        "improved" when the whole interval is above zero, "worse" when it is below, else "within noise".

    Raises:
        ValueError: The query sets differ, or the metric is missing.
    """
    return judged(compare(baseline, candidate, metric, confidence=confidence))


def guard_verdict(baseline: EvaluationResult, candidate: EvaluationResult, metric: str) -> Verdict:
    """Judge a set on which the candidate should lose nothing: where it is worse, the sentence says that it forgets.

    Raises:
        ValueError: The query sets differ, or the metric is missing.
    """
    result = verdict(baseline, candidate, metric)
    if result.word != "worse":
        return result
    return replace(result, sentence=result.sentence.replace("worse:", "forgets:", 1))


def mean_verdict(pairs: Sequence[BeforeAndAfter], metric: str) -> Verdict:
    """Judge the mean over several sets, each counting the same, of a baseline and a candidate on each.

    Raises:
        ValueError: The query sets of a pair differ, or the metric is missing.
    """
    comparison = _compare(pairs, metric, CONFIDENCE)
    fewest = min(len(baseline.per_query[metric]) for baseline, _ in pairs)
    return judged(comparison, is_judgeable=fewest > 1)


def judged(comparison: Comparison, *, is_judgeable: bool = True) -> Verdict:
    """Put a comparison into a word and a sentence.

    Args:
        is_judgeable: False where a set has a single query, which leaves the word at "within noise".
    """
    word: VerdictWord = "within noise"
    if is_judgeable and comparison.num_queries > 1:
        if comparison.low > 0.0:
            word = "improved"
        elif comparison.high < 0.0:
            word = "worse"
    return Verdict(word, comparison, f"{word}: {numbers_text(word, comparison)}")


def numbers_text(word: VerdictWord, comparison: Comparison) -> str:
    """Return the numbers behind a verdict, e.g. "ndcg@10 0.332 -> 0.397 (+0.065, 95% interval ..., 467 queries)"."""
    decimals = decimals_shown(word, comparison)
    means = f"{comparison.metric} {comparison.baseline:.{decimals}f} -> {comparison.candidate:.{decimals}f}"
    return f"{means} ({_signed(comparison.difference, decimals)}, {interval_text(word, comparison)})"


def interval_text(word: VerdictWord, comparison: Comparison) -> str:
    """Return the interval of a verdict's difference, e.g. "95% interval +0.045 to +0.086, 467 queries"."""
    if comparison.num_queries < 2:
        return "1 query: too few for an interval"
    low, high = (_signed(bound, decimals_shown(word, comparison)) for bound in (comparison.low, comparison.high))
    return f"{100 * comparison.confidence:g}% interval {low} to {high}, {comparison.num_queries:,} queries"


def decimals_shown(word: VerdictWord, comparison: Comparison, *, most: int = FLOAT_NOISE_DECIMALS) -> int:
    """Return the decimals to show a comparison with: 3, or more where the bound that decided would read as zero.

    "improved ... interval +0.000 to +0.001" would contradict itself.
    """
    if word == "within noise":
        return 3
    bound = comparison.low if word == "improved" else comparison.high
    return next((decimals for decimals in range(3, most) if round(bound, decimals)), most)


def _signed(value: float, decimals: int) -> str:
    if not math.isfinite(value):
        return "n/a"
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"  # adding 0.0 makes the -0.0 that rounding leaves +0.0


def compare(
    baseline: EvaluationResult, candidate: EvaluationResult, metric: str, *, confidence: float = CONFIDENCE
) -> Comparison:
    """Compare two systems in one metric, with the interval of their mean paired difference.

    Raises:
        ValueError: The query sets differ, or the metric is missing.
    """
    return _compare([(baseline, candidate)], metric, confidence)


def _compare(pairs: Sequence[BeforeAndAfter], metric: str, confidence: float) -> Comparison:
    """Compare a baseline and a candidate in their mean over sets, each counting the same."""
    values = [_paired_values(*pair, metric) for pair in pairs]
    # Divided by the number of sets, the means of the sets' differences add up to the mean over sets.
    differences = [(after_Q - before_Q) / len(pairs) for before_Q, after_Q in values]
    low, high = _interval(differences, confidence)
    return Comparison(
        metric=metric if len(pairs) == 1 else f"mean {metric} of {len(pairs)} sets",
        baseline=fmean(fmean(before_Q) for before_Q, _ in values),
        candidate=fmean(fmean(after_Q) for _, after_Q in values),
        difference=round(sum(float(part_Q.mean()) for part_Q in differences), FLOAT_NOISE_DECIMALS),
        low=low,
        high=high,
        num_queries=sum(map(len, differences)),
        confidence=confidence,
    )


def _paired_values(
    baseline: EvaluationResult, candidate: EvaluationResult, metric: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values of both systems, query by query.

    Raises:
        ValueError: The query sets differ, or the metric is missing.
    """
    ids, before_Q = query_values(baseline, metric)
    candidate_ids, after_Q = query_values(candidate, metric)
    if ids != candidate_ids:

        def some(missing: set[str]) -> str:
            shown = ", ".join(sorted(missing)[:3])
            return f"{len(missing)} ({shown}{', ...' if len(missing) > 3 else ''})" if missing else "none"

        raise ValueError(
            f"{metric} of {baseline.system} and of {candidate.system} are over different queries: "
            f"{some(set(ids) - set(candidate_ids))} only in the first, "
            f"{some(set(candidate_ids) - set(ids))} only in the second; evaluate both on the same task."
        )
    return before_Q, after_Q


def query_values(result: EvaluationResult, metric: str) -> tuple[list[str], NDArray[np.float64]]:
    """Return the query ids in sorted order, so that no interval depends on the order of a file, and their values.

    Raises:
        ValueError: The metric is missing, or there is no query.
    """
    if metric not in result.per_query:
        known = ", ".join(sorted(result.per_query)) or "none"
        raise ValueError(f"{result.system} on {result.task} has no metric {metric!r}; it has: {known}.")
    values = result.per_query[metric]
    if not values:
        raise ValueError(f"{result.system} on {result.task} has no query with a relevant document: nothing to compare.")
    ids = sorted(values)
    return ids, np.asarray([values[query_id] for query_id in ids], dtype=np.float64)


def paired_p_value(pairs: Sequence[BeforeAndAfter], metric: str) -> float:
    """Return the two-sided p-value of Student's paired test, below 0.05 exactly where the 95% interval leaves out 0.

    Args:
        pairs: A baseline and a candidate on each set, the sets counting the same.

    Returns:
        1 where nothing differs, or a set has a single query.

    Raises:
        ValueError: The query sets of a pair differ, or the metric is missing.
    """
    values = [_paired_values(*pair, metric) for pair in pairs]
    differences = [(after_Q - before_Q) / len(pairs) for before_Q, after_Q in values]
    middle, error, freedom = _estimate(differences)
    # The rounding is that of the interval: both call the same difference none.
    if min(map(len, differences)) < 2 or round(middle, FLOAT_NOISE_DECIMALS) == 0.0:
        return 1.0
    if error == 0.0:  # all queries differ by the same: no chance in it
        return 0.0
    from scipy.special import stdtr

    return 2.0 * float(stdtr(freedom, -abs(middle) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for how many they are, in their order.

    Rejecting what is then below 0.05 makes any false rejection among them at most 5% likely, however they depend on one
    another.

    Source:
        Holm, A Simple Sequentially Rejective Multiple Test Procedure (1979).
    """
    corrected = [1.0] * len(p_values)
    largest = 0.0
    # The smallest is multiplied by their number n, the next by n - 1, and so on. A corrected p may not be below that of
    # a smaller one: the procedure stops at the first that isn't rejected.
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def mean_interval(results: Sequence[EvaluationResult], metric: str) -> tuple[float, float]:
    """Return the 95% interval of one system's mean over sets, each set counting the same; of one set, that of its mean.

    It speaks of other queries of these sets, not of other sets. Intervals of two systems may overlap although one is
    surely better: `compare` them instead.

    Raises:
        ValueError: There is no result, or the metric is missing.
    """
    if not results:
        raise ValueError("there is no result to take the mean of.")
    parts = [query_values(result, metric)[1] / len(results) for result in results]
    return _cut(_interval(parts, CONFIDENCE), parts, 1 / len(results))


def sum_interval(results: Sequence[EvaluationResult], metrics: Sequence[str]) -> tuple[float, float]:
    """Return the 95% interval of the sum of some metrics' means over some sets, each with queries of its own.

    Raises:
        ValueError: A metric is missing.
    """
    # A query's metrics depend on one another (hit@1 makes hit@5): their sum is one value of that query.
    parts = [np.sum([query_values(result, metric)[1] for metric in metrics], axis=0) for result in results]
    return _cut(_interval(parts, CONFIDENCE), parts, len(metrics))


def _interval(parts: Sequence[NDArray[np.float64]], confidence: float) -> tuple[float, float]:
    """Return the interval of a sum of means, each of independent values (Q,); a point where no values differ."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it is a share between 0 and 1, e.g. 0.95.")
    middle, error, freedom = _estimate(parts)
    return _t_interval(middle, error, freedom, confidence)


def _t_interval(middle: float, error: float, freedom: float, confidence: float) -> tuple[float, float]:
    """Return Student's interval around an estimate with a standard error."""
    reach = 0.0
    if error > 0.0:
        from scipy.special import stdtrit  # a verdict comes at the end of a run; its start is spared the import

        reach = float(stdtrit(freedom, (1.0 + confidence) / 2.0)) * error
    return round(middle - reach, FLOAT_NOISE_DECIMALS), round(middle + reach, FLOAT_NOISE_DECIMALS)


def _estimate(parts: Sequence[NDArray[np.float64]]) -> tuple[float, float, float]:
    """Return a sum of means, its standard error, and degrees of freedom; the error is 0 where no values differ."""
    middle = sum(float(part.mean()) for part in parts)
    # A set of one query has no variance that could be estimated: it moves the mean and leaves the error alone.
    squares = [(float(part.var(ddof=1)) / len(part), len(part) - 1) for part in parts if len(part) > 1]
    total = sum(square for square, _ in squares)
    if total <= 0.0:
        return middle, 0.0, 0.0
    # Welch: squared standard errors of independent means add up, and a small set with a large share of them takes
    # degrees of freedom from the sum. For one set this is Q - 1.
    return middle, total**0.5, total**2 / sum(square**2 / free for square, free in squares)


def _cut(bounds: tuple[float, float], parts: Sequence[NDArray[np.float64]], most: float) -> tuple[float, float]:
    """Cut bounds to what a sum of means can be where each value lies between 0 and `most`, as metrics do."""
    if any(part.min() < 0.0 or part.max() > most for part in parts):  # a plugin's metric may have any range
        return bounds
    low, high = bounds
    return max(low, 0.0), min(high, most * len(parts))


def recall_sum(forward: EvaluationResult, reverse: EvaluationResult) -> Estimate | None:
    """Return R@1 + R@5 + R@10 of both directions in percent, 0 to 600, or None where one of them lacks a cut-off.

    Args:
        reverse: The other one, with queries of its own.

    Source:
        Chen et al., UNITER (2020).
    """
    results = (forward, reverse)
    if any(metric not in result.per_query for result in results for metric in RSUM_METRICS):
        return None
    value = 100 * sum(result.metrics[metric] for result in results for metric in RSUM_METRICS)
    # The two directions are taken as independent: their queries are different items.
    low, high = sum_interval(results, RSUM_METRICS)
    return Estimate(value, 100 * low, 100 * high)


@dataclass(frozen=True, slots=True)
class SetOutcome:
    """The model before and after training on one set."""

    role: SetRole
    verdict: Verdict  # of a guard set its sentence begins with "forgets" in place of "worse"
    baseline: EvaluationResult
    final: EvaluationResult
    trained: frozenset[str] = frozenset()  # queries that training rows hold with an answer
    near: frozenset[str] = frozenset()  # further queries that nearly equal such ones

    @classmethod
    def of(
        cls,
        role: SetRole,
        baseline: EvaluationResult,
        final: EvaluationResult,
        metric: str,
        *,
        trained: Collection[str] = (),
        near: Collection[str] = (),
    ) -> SetOutcome:
        """Compare the model before and after training, by the metric or by what decides on the set instead."""
        judge = guard_verdict if role == "guard" else verdict
        decision = judge(baseline, final, final.deciding(metric))
        return cls(role, decision, baseline, final, frozenset(trained), frozenset(near))

    @property
    def unseen(self) -> SetOutcome | None:
        """The outcome on the queries that were neither trained on nor nearly so; None where no query is left."""
        # Verdicts before and after are over the same queries: both results lose the same ones.
        seen = self.trained | self.near
        baseline, final = self.baseline.without(seen), self.final.without(seen)
        return SetOutcome.of(self.role, baseline, final, self.verdict.comparison.metric) if final.num_queries else None

    @property
    def forgets(self) -> bool:
        """True where the model lost what it is to keep."""
        return self.role == "guard" and self.verdict.word == "worse"

    @property
    def word(self) -> str:
        """The verdict's word: improved, within noise, worse or forgets."""
        return "forgets" if self.forgets else self.verdict.word

    @property
    def line(self) -> str:
        """The set, its numbers and the word, e.g. "scifact/test: ndcg@10 0.645 -> 0.621 (...): forgets"."""
        return f"{self.final.task}: {numbers_text(self.verdict.word, self.verdict.comparison)}: {self.word}"


def averaged(outcomes: Sequence[SetOutcome]) -> list[SetOutcome]:
    """Return the test sets whose mean decides: those with the metric of the first."""
    first, *more = (outcome for outcome in outcomes if outcome.role != "guard")
    metric = first.verdict.comparison.metric
    return [first, *(outcome for outcome in more if outcome.verdict.comparison.metric == metric)]


def overall(outcomes: Sequence[SetOutcome]) -> Verdict:
    """Return the verdict of a run: that of its test set, or of the mean over several that are measured alike."""
    alike = averaged(outcomes)
    first = alike[0].verdict
    if len(alike) == 1:
        return first
    return mean_verdict([(outcome.baseline, outcome.final) for outcome in alike], first.comparison.metric)


def caveats(outcomes: Sequence[SetOutcome], num_choices: int) -> tuple[str, ...]:
    """Return what takes from the worth of a verdict, one sentence each: queries that were trained on, a choice.

    Args:
        num_choices: Checkpoints that the set of the verdict chose one of.
    """
    sentences = []
    for outcome in outcomes:
        if not outcome.trained | outcome.near:
            continue
        counts = [(len(outcome.trained), "trained on with an answer"), (len(outcome.near), "nearly trained on")]
        seen = " and ".join(f"{count:,} {'was' if count == 1 else 'were'} {words}" for count, words in counts if count)
        rest = outcome.unseen
        without = f"without them {rest.verdict.sentence}" if rest else "no other is left to judge by"
        of = f"of {plural(outcome.final.num_queries, 'query', 'queries')} of {outcome.final.task}"
        sentences.append(f"{of}, {seen}; {without}")
    # Of several sets the verdict is their mean: the sentences above, on one set each, don't tell what is left of it.
    alike = averaged(outcomes)
    if len(alike) > 1 and any(outcome.trained | outcome.near for outcome in alike):
        unseen = [rest for outcome in alike if (rest := outcome.unseen) is not None]
        sentences += [f"all test sets without such queries: {overall(unseen).sentence}"] if unseen else []
    if num_choices > 1:
        sentences.append(
            f"the verdict is on the dev set that chose one of {num_choices} checkpoints, which flatters it; give "
            f"test_data_path for one that counts"
        )
    return tuple(sentences)


def headline(decided: Verdict, outcomes: Sequence[SetOutcome]) -> str:
    """Return the line that ends a run: the verdict, and what it doesn't say of its sets (`warnings_text`)."""
    return decided.sentence + warnings_text(outcomes)


def warnings_text(outcomes: Sequence[SetOutcome]) -> str:
    """Return what follows a verdict, e.g. "; trained on 3 of these queries; forgets on scifact/test", or ""."""
    text = ""
    if num_trained := sum(len(outcome.trained) for outcome in outcomes if outcome.role != "guard"):
        text += f"; trained on {num_trained:,} of these queries"
    lost = [outcome.final.task for outcome in outcomes if outcome.forgets]
    return f"{text}; forgets on {', '.join(lost)}" if lost else text


def worse_than_untrained(evaluations: Sequence[tuple[int, Mapping[str, float]]], metric: str, kept_step: int) -> str:
    """Return a warning where the saved model scores below the untrained one on the dev set, else an empty text.

    Args:
        evaluations: (step, metrics on the dev set); step 0 is the untrained model.
    """
    values = {step: metrics[metric] for step, metrics in evaluations if metric in metrics}
    if kept_step == 0 or not {0, kept_step} <= values.keys() or values[kept_step] >= values[0]:
        return ""
    return (
        f"On the dev set the saved model is worse than the untrained one: {metric} {values[kept_step]:.4f} at step "
        f"{kept_step}, {values[0]:.4f} before training. Try a lower learning_rate or fewer steps."
    )


@dataclass(frozen=True, slots=True)
class SeedsVerdict:
    """The verdict of several seeds together, with the means of each."""

    verdict: Verdict  # of the mean over seeds; its interval is over seeds and queries
    baselines: tuple[float, ...]  # of each seed, before training
    finals: tuple[float, ...]  # of each seed, after it

    @property
    def spread(self) -> float:
        """Standard deviation of the trained models' metric from seed to seed."""
        return stdev(self.finals)


def seeds_verdict(runs: Sequence[Sequence[BeforeAndAfter]], metric: str) -> SeedsVerdict:
    """Judge training by several seeds.

    Args:
        runs: Of each seed its results before and after training, on one set or on several.

    Raises:
        ValueError: Seeds were evaluated on different queries, the metric is missing, or there are fewer than 2 seeds.
    """
    if len(runs) < 2:
        raise ValueError("one seed says nothing about others; give at least 2.")

    def metric_table(results: Sequence[EvaluationResult]) -> NDArray[np.float64]:
        ids, _ = query_values(results[0], metric)
        rows = []
        for result in results:
            its_ids, values_Q = query_values(result, metric)
            if its_ids != ids:
                raise ValueError(f"{result.task}: the seeds were evaluated on different queries.")
            rows.append(values_Q)
        return np.stack(rows)

    # Lists of tables (S, Q), one for each set. A seed may start from weights of its own: baselines differ, too.
    before, after = (
        [metric_table([run[number][side] for run in runs]) for number in range(len(runs[0]))] for side in (0, 1)
    )
    parts = [after_SQ - before_SQ for before_SQ, after_SQ in zip(before, after, strict=True)]
    low, high = seeds_interval(parts)
    baselines, finals = (
        tuple(fmean(float(table[seed].mean()) for table in tables) for seed in range(len(runs)))
        for tables in (before, after)
    )
    comparison = Comparison(
        metric=metric if len(parts) == 1 else f"mean {metric} of {len(parts)} sets",
        baseline=fmean(baselines),
        candidate=fmean(finals),
        difference=round(fmean(float(part_SQ.mean()) for part_SQ in parts), FLOAT_NOISE_DECIMALS),
        low=low,
        high=high,
        num_queries=sum(part_SQ.shape[1] for part_SQ in parts),
        confidence=CONFIDENCE,
    )
    decision = judged(comparison, is_judgeable=min(part_SQ.shape[1] for part_SQ in parts) > 1)
    sentence = f"{decision.sentence.removesuffix(')')}, {len(runs)} seeds)"
    return SeedsVerdict(replace(decision, sentence=sentence), baselines, finals)


def seeds_interval(parts: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Return the 95% interval of the mean of differences over other seeds and other queries.

    The mean of a table of S seeds x Q queries varies with the seeds (sigma_s), with the queries (sigma_q) and with both
    together (sigma_e):

        Var(mean) = sigma_s^2 / S + sigma_q^2 / Q + sigma_e^2 / (S Q)

    1. The variance of the S means over queries, divided by S, estimates the first and the last term.
    2. The variance of the Q means over seeds, divided by Q, estimates the second and the last term.
    3. What neither explains, divided by S Q, estimates the last term, which 1 and 2 have both counted: it goes off
       once.

    A negative share of the seeds counts as none. The interval is Student's t with Satterthwaite's degrees of freedom:
    where seeds differ more than queries do, 3 of them leave 2, and the interval is wide. A bootstrap of 3 seeds would
    be too narrow by a factor of (S - 1) / S. Over several sets, 2 and 3 are summed over the sets.

    Args:
        parts: Of each set the differences (S, Q), of the same seeds in the same order. Sets count the same.

    Source:
        Two-way random effects without replication: Satterthwaite, An Approximate Distribution of Estimates of Variance
        Components (Biometrics Bulletin 1946); Brennan, Generalizability Theory (2001), the p x i design.
    """
    num_seeds, num_sets = len(parts[0]), len(parts)
    means_S = np.mean([part_SQ.mean(axis=1) for part_SQ in parts], axis=0)
    terms = []  # (variance, degrees of freedom), step 2 of each set first
    rest, rest_freedom = 0.0, 0.0  # step 3, summed over the sets
    for part_SQ in parts:
        count = part_SQ.shape[1]
        if count < 2:  # one query says nothing of others
            continue
        terms.append((float(part_SQ.mean(axis=0).var(ddof=1)) / count / num_sets**2, count - 1.0))
        residual_SQ = part_SQ - part_SQ.mean(axis=0) - part_SQ.mean(axis=1, keepdims=True) + part_SQ.mean()
        freedom = (count - 1) * (num_seeds - 1)
        rest += float((residual_SQ**2).sum()) / freedom / (num_seeds * count) / num_sets**2
        rest_freedom += freedom
    of_seeds = float(means_S.var(ddof=1)) / num_seeds
    if of_seeds > rest:  # else the seeds' share would be negative: step 1 and the correction both stay out
        terms += [(of_seeds, num_seeds - 1.0), (-rest, rest_freedom)]
    total = sum(variance for variance, _ in terms)
    freedom_of_total = total**2 / sum(variance**2 / free for variance, free in terms if free) if total > 0.0 else 0.0
    return _t_interval(float(means_S.mean()), max(total, 0.0) ** 0.5, freedom_of_total, CONFIDENCE)
