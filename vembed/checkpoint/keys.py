"""Keys of what is written and how a run continues."""

import os.path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vembed.registry import TRACKERS
from vembed.section import LARGEST_COUNT, Count, Name, Positive, Registered, Section, key

TrackerNames = Annotated[
    str | list[str],
    Registered(
        lambda value: (
            value in ("all", "none")
            or all(name in TRACKERS for name in (value if isinstance(value, list) else [value]))
        ),
        lambda: {
            "anyOf": [
                {"type": "string", "enum": [*TRACKERS.names(), "all", "none"]},
                {"type": "array", "items": {"enum": [*TRACKERS.names()]}},
            ]
        },
    ),
]

BY_STRATEGY = {"save_strategy": ("steps", "epoch")}


class OutputKeys(Section):
    """Output of a run: what is written, how often, and what happens when something is there or goes wrong."""

    output_dir: Annotated[Name, AfterValidator(os.path.expanduser)] = key(
        "outputs", "Folder of everything that the run writes.", affects="process"
    )
    overwrite_output_dir: bool = key(False, "With resume never: delete the run in output_dir.", affects="process")
    save_strategy: Literal["steps", "epoch", "no"] = key(
        "steps",
        "When checkpoints are written beside the last one and, where evaluations choose it, the best. steps: by "
        "save_steps and save_minutes; epoch: at the end of each epoch as well; no: never.",
        affects="run",
    )
    save_steps: Count | None = key(
        None,
        "Steps from one checkpoint to the next; null and 0: none by steps.",
        unit="steps",
        affects="run",
        acts_with=BY_STRATEGY,
    )
    save_minutes: Positive | None = key(
        None,
        "Minutes from one checkpoint to the next.",
        unit="minutes",
        affects="run",
        acts_with=BY_STRATEGY,
    )
    save_total_limit: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = key(
        2, "Newest checkpoints kept, beside the best one.", unit="checkpoints", affects="run"
    )
    resume: Name = key(
        "auto",
        "auto continues from the newest valid checkpoint; never starts over; a path names a checkpoint.",
        affects="run",
    )
    resume_elastic: bool = key(
        False,
        "Continue from a checkpoint with another number of processes or another strategy: the same global batches, "
        "equal to rounding and no longer bit for bit.",
        affects="run",
    )
    embedding_cache: Name = key(
        "auto",
        "Embeddings of a frozen tower, each encoded once: auto keeps them in output_dir where this run would encode "
        "them again, never keeps none, a path names a folder that runs share.",
    )
    logging_steps: Count = key(10, "Steps from one log line to the next.", unit="steps", affects="run")
    report_to: TrackerNames = key(
        "tensorboard",
        "Trackers beside metrics.jsonl, which is always written; all is each whose package is installed.",
        affects="process",
    )
    log_model: bool = key(
        False,
        "Give the trained model to the trackers that take one too (wandb, mlflow, trackio); it is as large as model/.",
        affects="process",
    )
    nonfinite_policy: Literal["stop", "skip"] = key(
        "stop", "At a loss or gradient that is NaN or infinite: stop the run, or skip the step and count it."
    )
    max_skipped_steps: Count = key(
        10,
        "With nonfinite_policy skip: more skipped steps than this stop the run.",
        unit="steps",
        acts_with={"nonfinite_policy": ("skip",)},
    )
