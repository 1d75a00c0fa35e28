"""Keys of a teacher: a model that doesn't train, and that a loss learns from."""

from typing import TYPE_CHECKING

from vembed.config.fields import ANY, Name, Section, key, rule
from vembed.config.keys.data import takes_pairs
from vembed.config.keys.loss import filters_by_teacher
from vembed.config.keys.sources import loss_names
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from vembed.config.schema import Config


class TeacherKeys(Section):
    """A model that a loss learns from; it is asked once, before the first step."""

    teacher_model_name: Name | None = key(
        None,
        "Model that a loss learns from, or that tells it false negatives: hub id or local folder of any encoder; for "
        "scores of a row's own documents also a cross-encoder of sentence-transformers (vembed[st]).",
    )
    teacher_revision: Name | None = key(
        None,
        "Branch, tag or commit of a teacher of the hub; null is the hub's default branch.",
        acts_with={"teacher_model_name": ANY},
    )
    teacher_cache: Name = key(
        "auto",
        "Folder of what the teacher makes of the training data, which runs may share; auto is OUTPUT_DIR/teacher.",
        acts_with={"teacher_model_name": ANY},
    )


def teacher_gives_scores(config: "Config") -> bool:
    """Return whether a teacher's scores of a row's own documents stand in for those that data may list.

    A loss that learns from positives as well keeps to them where the teacher is there for something else.
    """
    losses = [LOSSES.load(name) for name in loss_names(config) if name in LOSSES]
    takers = [loss for loss in losses if {"pairs", "lists"} & set(loss.takes)]
    by_data = config.label_kind in ("pair", "grade")
    is_needed = any("positives" not in loss.takes for loss in takers)
    is_free = not any(loss.reads_teacher(config) for loss in losses)
    return config.teacher_model_name is not None and not by_data and bool(takers) and (is_needed or is_free)


@rule("teacher_model_name", "loss_type", "added_losses", "data", "label_kind", "false_negative_filter")
def _somebody_reads_the_teacher(config: "Config") -> str | None:
    """`teacher_model_name` must be set where the loss reads a teacher, and only there."""
    loss, is_given = config.loss_type, config.teacher_model_name is not None
    every = [name for name in loss_names(config) if name in LOSSES]
    is_read = any(LOSSES.load(name).reads_teacher(config) for name in every)
    if is_given == (is_read or (is_given and teacher_gives_scores(config))):
        return None
    if is_read:
        reader = "false_negative_filter teacher" if filters_by_teacher(config) else f"loss_type {loss}"
        return f"{reader} reads a teacher's vectors, and there is none; set teacher_model_name"
    if takes_pairs(*every):
        return f"label_kind {config.label_kind} gives the scores already; leave it out, or teacher_model_name"
    return (
        "nothing reads the teacher: set false_negative_filter to teacher or loss_type to distillation, or leave "
        "teacher_model_name out"
    )


@rule("teacher_model_name")
def _teacher_has_learnt(config: "Config") -> str | None:
    """`teacher_model_name` must not be a `builtin:` model, which knows nothing yet."""
    return _untrained(config.teacher_model_name)


@rule("mine_teacher")
def _teacher_of_mining_has_learnt(config: "Config") -> str | None:
    """`mine_teacher` must not be a `builtin:` model, which knows nothing yet."""
    return _untrained(config.mine_teacher)


def _untrained(name: str | None) -> str | None:
    if name is None or not name.startswith("builtin:"):
        return None
    return f"{name} is untrained and has nothing to teach; name the folder of a trained model"
