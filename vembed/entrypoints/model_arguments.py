"""The options that every command with a model takes, under the names of `vembed.load`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.config.messages import checked_section
from vembed.errors import ConfigError
from vembed.models.keys import ModelKeys

if TYPE_CHECKING:
    import argparse

    from vembed.api.loading import LoadOptions


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    parser.add_argument("--query-prompt", metavar="TEXT", help="text before each query; default: the model's own")
    parser.add_argument("--document-prompt", metavar="TEXT", help="text before each document; default: the model's own")
    parser.add_argument("--max-seq-length", type=int, metavar="N", help="longest input in tokens; default: the model's")
    parser.add_argument("--model-revision", metavar="COMMIT", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model; needs a commit"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="allow pickled weights (read with weights_only)")
    parser.add_argument("--bf16", action="store_true", help="encode in bfloat16")


def add_picture_argument(parser: argparse.ArgumentParser) -> None:
    """Add the cap on pictures to a command that decodes what its user names."""
    parser.add_argument(
        "--max-image-pixels", type=int, metavar="N", help="refuse larger pictures; default: 89,478,485 pixels"
    )


def load_options(parsed: argparse.Namespace) -> LoadOptions:
    """Return what the user said, without what was left out."""
    options: LoadOptions = {}
    if parsed.query_prompt is not None:
        options["query_prompt"] = parsed.query_prompt
    if parsed.document_prompt is not None:
        options["document_prompt"] = parsed.document_prompt
    if parsed.max_seq_length is not None:
        options["max_seq_length"] = parsed.max_seq_length
    if parsed.model_revision is not None:
        options["model_revision"] = parsed.model_revision
    if getattr(parsed, "max_image_pixels", None) is not None:
        options["max_image_pixels"] = parsed.max_image_pixels
    if parsed.trust_remote_code:
        options["trust_remote_code"] = True
    if parsed.allow_pickle:
        options["allow_pickle"] = True
    if parsed.bf16:
        options["bf16"] = True
    return options


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the owner of a model says on its card."""
    card = parser.add_argument_group("for the model card; what isn't given reads 'not stated'")
    card.add_argument("--license", metavar="ID", help="licence of the model, e.g. apache-2.0")
    card.add_argument("--base-model-license", metavar="ID", help="licence of the model that training started from")
    card.add_argument("--language", nargs="+", default=[], metavar="CODE", help="languages of the model, e.g. en de")


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what decides whether a model may be read, to a command that writes it."""
    source = parser.add_argument_group("for models that need it")
    source.add_argument("--model-revision", metavar="COMMIT", help="branch, tag or commit of a hub model")
    source.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model; needs a commit"
    )
    source.add_argument("--allow-pickle", action="store_true", help="allow pickled weights (read with weights_only)")


def source_keys(parsed: argparse.Namespace, model: str) -> ModelKeys:
    """Return how a model is read that a command writes again.

    Raises:
        ConfigError: The model's code would run without a commit that was read.
    """
    from vembed.api.loading import COMMIT

    if parsed.trust_remote_code and not COMMIT.fullmatch(parsed.model_revision or ""):
        raise ConfigError("--trust-remote-code needs --model-revision: the commit (40 hex digits) whose code you read")
    names = ("model_revision", "trust_remote_code", "allow_pickle")
    return checked_section(ModelKeys, {"model_name": model, **{key: getattr(parsed, key) for key in names}})
