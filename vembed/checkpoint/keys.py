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
    """Output of a run: its folder, checkpoints, logs, and the reactions to trouble."""

    output_dir: Annotated[Name, AfterValidator(os.path.expanduser)] = key(
        "outputs", "Folder for everything that the run writes.", affects="process"
    )
    overwrite_output_dir: bool = key(
        False, "Delete the run in output_dir first; needs resume never.", affects="process"
    )
    save_strategy: Literal["steps", "epoch", "no"] = key(
        "steps",
        "Schedule of checkpoints, beside the last one and, if evaluations choose it, the best. steps: by save_steps "
        "and save_minutes. epoch: at the end of each epoch as well. no: none.",
        affects="run",
    )
    save_steps: Count | None = key(
        None,
        "Steps between checkpoints. null and 0: none by steps.",
        unit="steps",
        affects="run",
        acts_with=BY_STRATEGY,
    )
    save_minutes: Positive | None = key(
        None,
        "Minutes between checkpoints.",
        unit="minutes",
        affects="run",
        acts_with=BY_STRATEGY,
    )
    save_total_limit: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = key(
        2, "Number of newest checkpoints to keep, beside the best.", unit="checkpoints", affects="run"
    )
    resume: Name = key(
        "auto",
        "Checkpoint to continue from. auto: the newest valid one. never: start over. A path: this checkpoint.",
        affects="run",
    )
    resume_elastic: bool = key(
        False,
        "Continue from a checkpoint with another number of processes or another strategy. Global batches stay the "
        "same; results are equal to rounding, no longer bit for bit.",
        affects="run",
    )
    embedding_cache: Name = key(
        "auto",
        "Cache for embeddings of a frozen tower, which encodes each item once. auto: in output_dir, if this run would "
        "encode items again. never: no cache. A path: a folder that runs share.",
    )
    logging_steps: Count = key(10, "Steps between log lines.", unit="steps", affects="run")
    report_to: TrackerNames = key(
        "tensorboard",
        "Trackers beside metrics.jsonl, which is always written. all: every one with an installed package.",
        affects="process",
    )
    log_model: bool = key(
        False,
        "Log the trained model too, to the trackers that accept one (wandb, mlflow, trackio). It is as large as "
        "model/.",
        affects="process",
    )
    nonfinite_policy: Literal["stop", "skip"] = key(
        "stop",
        "Action on a loss or gradient that is NaN or infinite. stop: end the run. skip: skip the step and count it.",
    )
    max_skipped_steps: Count = key(
        10,
        "Most steps that nonfinite_policy skip may skip; one more stops the run.",
        unit="steps",
        acts_with={"nonfinite_policy": ("skip",)},
    )
