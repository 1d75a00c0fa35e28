"""Keys of what is written and how a run goes on."""

from typing import Annotated, Literal

from pydantic import Field

from vembed.config.fields import LARGEST_COUNT, Count, Name, Positive, Section, key


class OutputKeys(Section):
    """What is written, how often, and what a run does when something is there or goes wrong."""

    output_dir: Name = key("outputs", "Folder of everything that the run writes.", on_resume="harmless")
    overwrite_output_dir: bool = key(False, "With resume never: delete the run in output_dir.", on_resume="harmless")
    save_steps: Count | None = key(None, "Steps from one checkpoint to the next.", unit="steps", on_resume="harmless")
    save_minutes: Positive | None = key(
        None, "Minutes from one checkpoint to the next.", unit="minutes", on_resume="harmless"
    )
    save_total_limit: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = key(
        2, "Newest checkpoints kept, beside the best one.", unit="checkpoints", on_resume="harmless"
    )
    resume: Name = key(
        "auto",
        "auto goes on from the newest valid checkpoint, never starts anew, a path names one.",
        on_resume="harmless",
    )
    resume_elastic: bool = key(
        False,
        "Go on from a checkpoint with another number of processes or another strategy: the same global batches, equal "
        "to rounding and no longer bit for bit.",
        on_resume="harmless",
    )
    embedding_cache: Name = key(
        "auto",
        "Embeddings of a frozen tower, each encoded once: auto keeps them in output_dir where this run would encode "
        "them again, never keeps none, a path names a folder that runs share.",
    )
    logging_steps: Count = key(10, "Steps from one log line to the next.", unit="steps", on_resume="harmless")
    report_to: Literal["tensorboard", "none"] = key(
        "tensorboard", "Tracker beside metrics.jsonl, which is always written.", on_resume="harmless"
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
