"""Keys of the evaluation."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from vembed.config.fields import Auto, Count, Section, key, rule
from vembed.registry import METRICS

if TYPE_CHECKING:
    from vembed.config.schema import Config


_METRIC_NAMES = METRICS.names()
_METRIC_DEPTHS = (1, 3, 5, 10, 100)

OUR_METRICS = tuple(f"{name}@{depth}" for name in _METRIC_NAMES for depth in _METRIC_DEPTHS)
"""The metrics that can choose a checkpoint, beside those of plugins."""


def _known_metric(name: str) -> str:
    if name not in OUR_METRICS and name not in {f"{each}@{k}" for each in METRICS.plugins() for k in _METRIC_DEPTHS}:
        raise PydanticCustomError("unknown_metric", "no such metric")
    return name


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
    metric_for_best_model: Annotated[str, AfterValidator(_known_metric)] = key(
        "ndcg@10",
        "Metric that chooses the best checkpoint; higher is better.",
        choices=OUR_METRICS,
        more_choices=True,
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
