"""Early refusals: mistakes that show within a second, before torch is imported, a model is loaded or all rows are read.

The run refuses all of them too; nothing here is a rule of its own. No torch here.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.checkpoint.format import (
    FutureCheckpointError,
    InvalidCheckpointError,
    read_manifest,
    refuse_other_folder,
    step_name,
    steps_in,
)
from vembed.config.record import ResumeDifference, resume_differences
from vembed.data.read import DataSource
from vembed.data.run_data import all_sources
from vembed.errors import ConfigError, VembedError
from vembed.files import home_path, is_file, is_folder, listed_paths
from vembed.models.keys import model_names, renamed
from vembed.models.names import MODEL_FOLDER, PAIR_SIGN, locate
from vembed.training.output import OutputFolder
from vembed.training.trackers import refuse_missing_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any

    from vembed.batch import Modality
    from vembed.config.schema import Config
    from vembed.models.keys import ModelKeys


def refuse_wrong_run(config: Config, *, needs_data: bool = True) -> None:
    """Refuse what `refuse_wrong_inputs` and `refuse_wrong_output` refuse and trackers that miss a package, together.

    Raises:
        VembedError: A line for each problem.
    """
    _refuse_all(
        [
            partial(refuse_wrong_inputs, config, needs_data=needs_data),
            partial(refuse_wrong_output, config),
            partial(refuse_missing_packages, config.report_to),
        ]
    )


def refuse_wrong_inputs(config: Config, *, needs_data: bool = True) -> None:
    """Refuse names that lead to no model, and data whose first rows show that a run can't train on them.

    Args:
        needs_data: Whether a configuration without training data is refused.

    Raises:
        VembedError: A line for each problem.
    """

    def refuse_wrong_model(key: str, name: str) -> None:
        try:
            located = locate(name).name
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        if is_file(located):
            raise ConfigError(f"{key}: {name} is a file; name the folder of the model")

    named = [("model_name", name) for name in model_names(config)]
    named += [(key, name) for key, name in _teachers(config).items() if name is not None]
    models = [partial(refuse_wrong_model, key, name) for key, name in named]
    has_data = config.data is not None or config.data_path is not None
    modalities: dict[str, frozenset[Modality]] = {}  # source -> those of its first rows
    _refuse_all([*models, *([partial(_refuse_wrong_data, config, modalities)] if has_data or needs_data else [])])
    # Looking at the model's class imports torch, which costs seconds: only rows with pictures are worth it, as nearly
    # all models read texts.
    if any(kinds - {"text"} for kinds in modalities.values()):
        _refuse_unread(config, modalities)


def refuse_wrong_output(config: Config) -> None:
    """Refuse an output folder in which the run can neither start nor continue.

    Raises:
        VembedError: The folder can't be written, holds something else, or a checkpoint of another configuration.
    """
    output = OutputFolder(Path(config.output_dir))
    output.refuse_unwritable()
    if config.resume == "never" or (config.resume == "auto" and not steps_in(output.checkpoints)):
        output.refuse_taken(overwrite=config.overwrite_output_dir, reads=paths_read(config))
    elif (checkpoint := _newest_checkpoint(config, output)) is not None:
        # The manifest alone is read. Whether the weights are whole is for the run: hashing gigabytes takes minutes.
        saved = read_manifest(checkpoint).stamp.get("config")
        if isinstance(saved, dict):
            accepted_differences(checkpoint, saved, config)


def paths_read(config: Config) -> list[Path]:
    """Return the files and folders that a run reads, as far as they are on this machine."""
    models = []
    # A run started afresh deletes its output folder, and must not delete its own model or data with it.
    for name in (*model_names(config), *filter(None, _teachers(config).values())):
        with suppress(ConfigError):  # told where models are looked at
            models.append(locate(name).name)
    has_data = config.data is not None or config.data_path is not None
    data = [file for source in all_sources(config) for file in listed_paths(source.path)] if has_data else []
    data += [] if config.mine_corpus is None else [config.mine_corpus]
    return [path for path in map(home_path, (*models, *data)) if is_file(path) or is_folder(path)]


def _teachers(config: Config) -> dict[str, str | None]:
    """Return the model of each key that names one beside the model that trains."""
    return {"teacher_model_name": config.teacher_model_name, "mine_teacher": config.mine_teacher}


def accepted_differences(checkpoint: Path, saved: Mapping[str, Any], config: Config) -> list[ResumeDifference]:
    """Return which keys have changed since a checkpoint was saved.

    Raises:
        ConfigError: Some of them change what is trained.
    """
    differences = resume_differences(saved, config)
    refused = [difference for difference in differences if difference.kind == "refused"]
    if refused:
        listed = "".join(f"\n  {key}: {old!r} in the checkpoint, {new!r} now" for key, old, new, _ in refused)
        run = checkpoint.parent.parent
        raise ConfigError(
            f"{checkpoint} was trained with another configuration:{listed}\nSet these back, choose another "
            f"output_dir, or start anew with resume=never overwrite_output_dir=true. To train on with the new values "
            f"from what it has learned, set model_name={run / MODEL_FOLDER} and another output_dir"
        )
    return differences


def refuse_other_place(checkpoint: Path, output: OutputFolder) -> None:
    """Refuse to continue from a checkpoint of another folder.

    Raises:
        ConfigError: The checkpoint isn't among those of the output folder.
    """
    # The checkpoint may be a link, out of the folder to a larger disk or into it from elsewhere.
    if output.checkpoints.resolve() not in (checkpoint.parent.resolve(), checkpoint.resolve().parent):
        raise ConfigError(
            f"resume: {checkpoint} is not in {output.checkpoints}, and a run continues only beside its baseline and "
            f"its metrics.jsonl; set output_dir to the folder of the run that the checkpoint is of"
        )


def _refuse_all(checks: Iterable[Callable[[], object]]) -> None:
    """Make all checks, and raise what they refuse as one error, of the kind of the first."""
    # One call shows every mistake; scripts get the exit code of the first. A mistake that two checks meet, such as a
    # path that is both dev and test set, is one line.
    refused: list[VembedError] = []
    for check in checks:
        try:
            check()
        except VembedError as error:
            refused.append(error)
    if refused:
        raise type(refused[0])("\n".join(dict.fromkeys(map(str, refused)))) from refused[0]


def _refuse_wrong_data(config: Config, modalities: dict[str, frozenset[Modality]]) -> None:
    """Refuse data that are missing or wrong by their first rows, and add what those rows hold to `modalities`."""

    def look(source: DataSource) -> None:
        _, modalities[source.path] = source.peek()

    sources = all_sources(config, config.loss_needs())
    _refuse_all(source.refuse_missing for source in sources)
    _refuse_all(partial(look, source) for source in sources)
    if config.mine_corpus is not None:
        DataSource(config.mine_corpus, "train", config, user_names=("mine_corpus", "mine_corpus")).documents()


def _refuse_unread(config: Config, modalities: Mapping[str, Collection[Modality]]) -> None:
    """Refuse pictures or texts for a model whose class reads none; no weights are loaded, and the hub isn't asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from vembed.data.picture_survey import refuse_unread
    from vembed.models.hub import ModelFiles
    from vembed.models.load import class_of

    keys: ModelKeys = config
    name = locate(config.model_name).name
    if not (is_folder(name) or ":" in name or PAIR_SIGN in name):
        # A hub id is judged by an earlier download: asking the hub takes a second, and fails without a network.
        cached: object = None
        with suppress(HFValidationError):  # told where the model is loaded
            cached = try_to_load_from_cache(name, "config.json", revision=config.model_revision)
        if not isinstance(cached, str) or config.trust_remote_code:
            return  # the plan tells, which reads the model's files
        keys = renamed(config, str(Path(cached).parent))
    refuse_unread(config.model_name, class_of(ModelFiles(keys)).modalities, modalities)


def _newest_checkpoint(config: Config, output: OutputFolder) -> Path | None:
    """Return the checkpoint that the run would continue from, as far as the sizes of its files tell."""
    if config.resume != "auto":
        named = home_path(config.resume)
        refuse_other_folder(named)
        refuse_other_place(named, output)
        return named
    for step in reversed(steps_in(output.checkpoints)):
        folder = output.checkpoints / step_name(step)
        try:
            read_manifest(folder)
        except (InvalidCheckpointError, FutureCheckpointError):
            continue  # the run says what is wrong with it
        return folder
    return None
