"""Keys of the evaluation."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from vembed.registry import METRICS
from vembed.section import Auto, Count, Registered, Rule, Section, key, option

_METRIC_DEPTHS = (1, 3, 5, 10, 100)


def metrics_that_choose() -> tuple[str, ...]:
    """Return the metrics that can choose a checkpoint, those of plugins included."""
    return tuple(f"{name}@{depth}" for name in METRICS.names() for depth in _METRIC_DEPTHS)


def _metric_schema() -> dict[str, Any]:
    form = f"NAME@K (NAME: {', '.join(METRICS.names())}; K: {', '.join(map(str, _METRIC_DEPTHS))})"
    return {"type": "string", "choices": list(metrics_that_choose()), "form": form}


Bm25Language: TypeAlias = Literal[
    "english",
    "dutch",
    "french",
    "german",
    "italian",
    "norwegian",
    "portuguese",
    "russian",
    "spanish",
    "swedish",
    "plain",
]
"""Languages that BM25 has both a stemmer and stop words for; plain stems nothing, and has English stop words."""


MetricName = Annotated[
    str, Registered(lambda name: METRICS.find(name.partition("@")[0]) and name in metrics_that_choose(), _metric_schema)
]


class EvaluationKeys(Section):
    """Schedule of the evaluations, and the metric that chooses the best checkpoint."""

    eval_strategy: Literal["epoch", "steps", "no"] = key(
        "epoch", "Schedule of the evaluations on validation data during training."
    )
    eval_steps: Count | None = key(
        None,
        "Steps between evaluations, with eval_strategy steps.",
        unit="steps",
        acts_with={"eval_strategy": ("steps",)},
    )
    eval_batch_size: Auto | Count = key(
        "auto",
        "Largest number of texts or pictures per encoder call in evaluation. auto: 256 on a CPU; enough to keep an "
        "accelerator busy.",
        unit="items",
        affects="run",
    )
    metric_for_best_model: MetricName = key("ndcg@10", "Metric that chooses the best checkpoint; higher is better.")
    early_stopping_patience: Count | None = key(
        None,
        "Stop after this many evaluations in a row without a better metric. null: never stop early.",
        unit="evaluations",
        acts_with={"eval_strategy": ("epoch", "steps")},
    )
    eval_both_directions: Auto | bool = key(
        "auto",
        "Also measure the verdict's set in reverse (documents search queries), before and after training. auto: on if "
        "texts search pictures or pictures search texts.",
    )
    bm25: bool = key(True, "Evaluate BM25 beside the model if the set is all texts.", affects="run")
    bm25_language: Bm25Language = key(
        "english",
        "Language of the texts: BM25 stems their words and leaves out the language's stop words. plain: unstemmed "
        "words of two or more letters, without English stop words.",
        affects="run",
        acts_with={"bm25": (True,)},
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`eval_strategy: steps` needs `eval_steps`.",
            ("eval_strategy", "eval_steps"),
            lambda config: config.eval_strategy == "steps" and config.eval_steps is None,
            "eval_strategy steps needs eval_steps; set eval_steps, such as 100, or eval_strategy to epoch",
        ),
        Rule(
            "`seeds` beside `test_data_path` needs an `eval_strategy` other than `no`.",
            ("seeds", "eval_strategy", "test_data_path"),
            lambda config: config.seeds and config.test_data_path and config.eval_strategy == "no",
            "seeds keeps the model that is best on the dev set, and eval_strategy no leaves it out; set it to epoch",
        ),
    )


class CardKeys(Section):
    """Words of a model's owner for its card; what isn't given reads "not stated"."""

    license: str | None = option(None, "licence of the model, e.g. apache-2.0", metavar="ID")
    base_model_license: str | None = option(None, "licence of the model that training started from", metavar="ID")
    language: list[str] = option([], "languages of the model, e.g. en de", metavar="CODE")
