"""The options that every command with a model takes, under the names of `vembed.load`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from vembed.api.model import LoadOptions


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    parser.add_argument("--query-prompt", metavar="TEXT", help="text before each query; default: the model's own")
    parser.add_argument("--document-prompt", metavar="TEXT", help="text before each document; default: the model's own")
    parser.add_argument("--max-seq-length", type=int, metavar="N", help="longest input in tokens; default: the model's")
    parser.add_argument("--model-revision", metavar="COMMIT", help="branch, tag or commit of a hub model")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a model brings; needs a commit")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, with weights_only")
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
