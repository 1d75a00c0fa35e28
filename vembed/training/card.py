"""The card of the model that a run keeps: the README.md that `vembed export` would write, beside its weights."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

from vembed.evaluation.card import CARD_FILE, render_card
from vembed.evaluation.card_facts import CardFacts, gather_run, model_facts, read_report, written_with
from vembed.files import replace_text, share_permissions
from vembed.models.exportable import writable_forms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.models.encoder import Encoder
    from vembed.training.output import OutputFolder

_log = logging.getLogger(__name__)


def write_model_card(
    output: OutputFolder,
    encoder: Encoder,
    *,
    config: Mapping[str, object],
    data_facts: Sequence[tuple[str, str]],
    environment: Mapping[str, str],
) -> None:
    """Write the card of a run's model. The model is saved by now: a card that fails must not make the run look lost.

    Args:
        output: Its evaluations and, where it could be written, its report are read.
        config: Without secrets.
        data_facts: (label, value) of the data, for a run without a report.
    """
    try:
        reported = read_report(output.path)
        run = gather_run(
            output.path,
            config=config,
            data_facts=reported[0] or data_facts,
            environment=reported[1] or environment,
        )
        model = model_facts(encoder, writable_forms(encoder)[0])
        facts = CardFacts(title=run.name, folder=output.model.name, model=model, run=run, versions=written_with())
        replace_text(output.model / CARD_FILE, render_card(facts))
        share_permissions(output.model)
    except OSError as error:
        _log.error("the model card could not be written; the model is complete: %s", error)
    except Exception:  # noqa: BLE001 - whatever it is, the model stands; the log has the traceback
        _log.error("the model card could not be written; the model is complete\n%s", traceback.format_exc())
