"""Keys of the evaluation."""

from typing import TYPE_CHECKING, Literal

from vembed.config.fields import Auto, Count, Section, key, rule

if TYPE_CHECKING:
    from vembed.config.schema import Config


_METRIC_NAMES = ("ndcg", "recall", "precision", "mrr", "map", "hit")
_METRIC_DEPTHS = (1, 3, 5, 10, 100)

METRICS = tuple(f"{name}@{depth}" for name in _METRIC_NAMES for depth in _METRIC_DEPTHS)
"""The metrics that can choose a checkpoint."""


class EvaluationKeys(Section):
    """When retrieval is measured, and what chooses the best checkpoint."""

    eval_strategy: Literal["epoch", "steps", "no"] = key(
        "epoch", "When the validation data are evaluated during training."
    )
    eval_steps: Count | None = key(
        None,
        "Steps from one evaluation to the next, with eval_strategy steps.",
        unit="steps",
        acts_with={"eval_strategy": ("steps",)},
    )
    eval_batch_size: Count = key(
        256, "Most texts or pictures of one encoder call in evaluation.", unit="items", on_resume="harmless"
    )
    metric_for_best_model: str = key(
        "ndcg@10",
        "Metric that chooses the best checkpoint; higher is better.",
        choices=METRICS,
        form=f"NAME@K (NAME: {', '.join(_METRIC_NAMES)}; K: {', '.join(map(str, _METRIC_DEPTHS))})",
    )
    early_stopping_patience: Count | None = key(
        None,
        "Stop after so many evaluations in a row without a better metric; null never does.",
        unit="evaluations",
        acts_with={"eval_strategy": ("epoch", "steps")},
    )
    eval_both_directions: Auto | bool = key(
        "auto",
        "Measure the verdict's set also with its documents searching its queries, before and after training; auto does "
        "where texts search pictures or pictures search texts.",
    )
    bm25: bool = key(True, "Evaluate BM25 beside the model where the set is all texts.", on_resume="harmless")


@rule("eval_strategy", "eval_steps")
def _steps_strategy_has_steps(config: "Config") -> str | None:
    """`eval_strategy: steps` needs `eval_steps`."""
    if config.eval_strategy != "steps" or config.eval_steps is not None:
        return None
    return "eval_strategy steps needs eval_steps; set eval_steps, such as 100, or eval_strategy to epoch"
