"""The card of a model that is written for others, by `vembed export` and `vembed push`.

In: the records of its run, and what its owner says. Out: the files beside a written model. Not here: how an encoder is
written (models), how a card reads (evaluation/card.py), and the way to the hub (plugins/push).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vembed.config.load import file_values
from vembed.errors import ConfigError, DataError
from vembed.evaluation.card import CARD_FILE, check_languages, check_license, render_card
from vembed.evaluation.card_facts import CardFacts, gather_run, model_facts, public_name, read_report, written_with
from vembed.files import is_folder
from vembed.redact import redact, redact_value
from vembed.registry import import_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from vembed.evaluation.keys import CardKeys
    from vembed.models.encoder import Encoder
    from vembed.models.exportable import Form

_log = logging.getLogger(__name__)


def spelled(owner: CardKeys) -> CardKeys:
    """Return an owner's words as the hub spells them, without secrets.

    Raises:
        ConfigError: A licence is empty, or a language no code.
    """
    licenses = {"license": owner.license, "base_model_license": owner.base_model_license}
    checked = {name: check_license(redact(words)) for name, words in licenses.items() if words is not None}
    return owner.model_copy(update={**checked, "language": [*check_languages(owner.language)]})


def card_files(
    title: str, folder: str, model: str, run_folder: Path | None, owner: CardKeys
) -> Callable[[Encoder, Form], Mapping[str, str]]:
    """Return a function that makes the card of an encoder in a written form, as the files beside it.

    Args:
        title: Name of the model in the card.
        folder: Name that its examples load: of a folder, or an id of the hub.
        model: Folder or id of the hub that the model is read from.
        run_folder: The run that trained it; None where none is known.
        owner: As `spelled` returned it.

    Raises:
        ConfigError: A licence of the model before it is given, and there is none.
    """
    run = None
    if run_folder is not None:
        path = run_folder / "config.yaml"
        try:
            config = {name: redact_value(value) for name, value in file_values(path).items()}
            import_plugins(config.get("plugins"))  # the card tells the facts of the loss
            data_facts, environment = read_report(run_folder)
            pairs = [(redact(label), redact(value)) for label, value in data_facts]
            run = gather_run(run_folder, config=config, data_facts=pairs, environment=environment)
        except (OSError, ConfigError, DataError) as error:
            # A model is worth a card without its run: the folder may be old, or half of it deleted.
            _log.warning("the card tells nothing of the run: %s (%s)", redact(str(error)), path)
    is_hub = run is None and not is_folder(model)
    if owner.base_model_license is not None and run is not None and run.base.kind == "built-in":
        raise ConfigError("--base-model-license: the run trained from scratch; leave it out")

    def card(encoder: Encoder, form: Form) -> Mapping[str, str]:
        facts = CardFacts(
            title=title,
            folder=folder,
            model=model_facts(encoder, form),
            run=run,
            base=public_name(model) if is_hub else None,
            license_id=owner.license,
            base_license=owner.base_model_license,
            languages=tuple(owner.language),
            versions=written_with(),
        )
        return {CARD_FILE: render_card(facts)}

    return card
