"""Keys of the evaluation."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vembed.config.fields import Auto, Count, Section, key, rule
from vembed.registry import METRICS

if TYPE_CHECKING:
    from vembed.config.schema import Config


_METRIC_DEPTHS = (1, 3, 5, 10, 100)


def metrics_that_choose() -> tuple[str, ...]:
    """Return the metrics that can choose a checkpoint, those of plugins included."""
    return tuple(f"{name}@{depth}" for name in METRICS.names() for depth in _METRIC_DEPTHS)


class MetricName:
    """Marks a key that takes a registered metric at a depth."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the metrics that there are now: plugins add some."""
        form = f"NAME@K (NAME: {', '.join(METRICS.names())}; K: {', '.join(map(str, _METRIC_DEPTHS))})"
        return {"type": "string", "choices": list(metrics_that_choose()), "form": form}

    @staticmethod
    def _known(name: str) -> str:
        if name not in metrics_that_choose():
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
    eval_batch_size: Auto | Count = key(
        "auto",
        "Most texts or pictures of one encoder call in evaluation; auto is 256 on a CPU, and on an accelerator as many "
        "as keep it busy.",
        unit="items",
        on_resume="harmless",
    )
    metric_for_best_model: Annotated[str, MetricName()] = key(
        "ndcg@10", "Metric that chooses the best checkpoint; higher is better."
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


@rule("seeds", "eval_strategy", "test_data_path")
def _seeds_are_compared_on_dev(config: "Config") -> str | None:
    """`seeds` beside `test_data_path` needs an `eval_strategy` other than `no`."""
    if config.seeds is None or config.test_data_path is None or config.eval_strategy != "no":
        return None
    return "seeds keeps the model that is best on the dev set, and eval_strategy no leaves it out; set it to epoch"
