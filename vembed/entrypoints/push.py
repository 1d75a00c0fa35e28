"""`vembed push RUN OWNER/NAME`: a trained model on the Hugging Face hub, with its card and nothing else of the run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.model_arguments import add_card_arguments, add_source_arguments, source_keys
from vembed.errors import ExitCode
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.api.push import Pushed

DESCRIPTION = (
    "Send a trained model to the Hugging Face hub: the folder that `vembed export` writes, with a card that tells what "
    "was measured. Checkpoints, logs and data stay here. The repository is private unless you say --public."
)


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="output folder of a run, or folder of a model")
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository of the hub; created if it doesn't exist")
    parser.add_argument("--public", action="store_true", help="let everyone see it; default: private")
    parser.add_argument("--dry-run", action="store_true", help="show what would be sent, and send nothing")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to send to; default: main")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")
    add_card_arguments(parser)
    add_source_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Send a trained model with its card to the Hugging Face hub."""
    parsed = parse_arguments(arguments, program=program)
    return run_command(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> int:
    from vembed.api.card import OwnersWords
    from vembed.api.push import PushRequest, push_model
    from vembed.distributed.signals import StopSignal

    quiet_libraries()
    request = PushRequest(
        source=parsed.model,
        repo=parsed.repo,
        public=parsed.public,
        dry_run=parsed.dry_run,
        revision=parsed.revision,
        message=parsed.message,
        words=OwnersWords.checked(parsed.license, parsed.base_model_license, parsed.language),
        keys=source_keys(parsed, "unnamed"),
    )
    with StopSignal(advice="nothing was sent, push again") as stop:
        pushed = push_model(request, poll=stop.poll)
    _print(pushed)
    return ExitCode.OK


def _print(pushed: Pushed) -> None:
    from vembed.pages.text import bytes_text

    for name, size in pushed.files:
        print(f"{bytes_text(size):>10}  {name}")
    for name in pushed.left_out:
        print(f"{'stays here':>10}  {redact(name)}")
    who = "private" if pushed.private else "public"
    if pushed.url is None:
        print(f"\nThe card tells the hub:\n\n{pushed.metadata}")
        print(f"dry run: {len(pushed.files)} files would go to {pushed.repo} ({who}); nothing was sent")
    else:
        print(f"sent {len(pushed.files)} files to {pushed.repo} ({who}): {pushed.url}")
