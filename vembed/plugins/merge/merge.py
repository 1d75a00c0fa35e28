"""Merge models into one: weights given, or chosen on sets, and the merged model written with its card.

1. The models are loaded in float32. The first one's encoder takes on the mixtures; the others' weights stay on the CPU.
2. Where the weights are to be chosen, every mixture of a grid is evaluated (choose.py). What an earlier start did is
   read from `.OUTPUT.merging`, which stays until the model is written.
3. The report is written before the model: a kill leaves both or none, and the same command continues.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from typing import TYPE_CHECKING

import vembed
from vembed.data.read import DataSource
from vembed.evaluation.card import CARD_FILE, render_card
from vembed.evaluation.card_facts import CardFacts, model_facts, written_with
from vembed.models.export import ExportRequest, stored_dtype, write_encoder
from vembed.models.load import load_encoder
from vembed.pages.write import write_page
from vembed.plugins.merge.choose import choose, merge_headline, merge_page
from vembed.plugins.merge.weights import Mixture
from vembed.redact import redact
from vembed.vectors.encode import ItemEncoder, encoding_budget
from vembed.vectors.provenance import digest, model_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from vembed.models.encoder import Encoder
    from vembed.models.export import Exported
    from vembed.models.exportable import Form
    from vembed.models.keys import ModelKeys
    from vembed.plugins.merge.command import MergeOptions


def merge_models(
    options: MergeOptions,
    models: Sequence[ModelKeys],
    output: Path,
    work: Path,
    *,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    command: str,
    poll: Callable[[], None],
) -> Exported:
    """Merge models, print how their weights were chosen, and return what was written.

    Args:
        models: At least two; the first one is to be preserved, and its dtype is that of the merged model.
        work: Folder of the evaluations of the choice; it goes away once the model is written.
        device: Where the mixtures are evaluated.
        poll: Called in long loops; raises to stop.

    Raises:
        VembedError: The models aren't of one architecture, a set can't be read, or the output can't be written.
    """
    names = [redact(model.model_name) for model in models]
    # Sets are read before models are loaded: a bad row costs no loading.
    user_names = ("--data or --guard", "--split or --guard-split")
    sets = [DataSource(path, "validation", split=split, user_names=user_names).judged() for path, split in options.sets]
    # Means of float32 weights, whatever is stored: rounding each model first would lose small differences.
    encoders = [load_encoder(model.model_copy(update={"torch_dtype": "float32"})).eval() for model in models]
    # Hashing reads every weight: only results that are kept need to know whose they are.
    identities = tuple(digest(model_key(encoder)) for encoder in encoders) if options.weights is None else ()
    mixture = Mixture(encoders, names)
    del encoders  # the mixture holds copies of their weights, and one encoder
    weights, pages = options.weights, output.with_name(f"{output.name}-report")
    if weights is None:
        encoder = mixture.encoder.to(device)
        encode = ItemEncoder(
            encoder, encoding_budget(encoder, device, options.batch_size), device, autocast_dtype, poll=poll
        )
        choice = choose(options, mixture, encode, sets, identities=identities, folder=work, poll=poll)
        weights = list(choice.chosen.weights)
        facts = {"method": options.method, "vembed": vembed.__version__, "torch": version("torch")}
        write_page(pages, merge_page(choice, names, facts, command))
        print(merge_headline(choice))
    # The last mixture that was tried isn't the chosen one.
    mixture.take(weights, options.method)
    title, record = redact(output.name), {"models": names, "weights": list(weights), "method": options.method}

    def files(encoder: Encoder, form: Form) -> Mapping[str, str]:
        card = CardFacts(
            title=title,
            folder=title,
            model=model_facts(encoder, form),
            run=None,
            base=None,
            license_id=None,
            base_license=None,
            languages=(),
            versions=written_with(),
        )
        return {CARD_FILE: render_card(card), "merge.json": json.dumps(record, indent=2) + "\n"}

    request = ExportRequest(keys=models[0], output=output, overwrite=options.overwrite)
    exported = write_encoder(mixture.encoder.to("cpu"), request, stored_dtype(models[0]), files, poll=poll)
    print(
        f"read back by {' and '.join(exported.readers)}: {exported.num_items} sample items, largest difference "
        f"{exported.difference:.2g}\n{exported.form} folder: {redact(str(output))}"
    )
    if options.weights is None:  # the model is whole: its evaluations, which a stopped start would need, can go
        shutil.rmtree(work, ignore_errors=True)
        print(f"report: {redact(str(pages / 'report.html'))}")
    return exported
