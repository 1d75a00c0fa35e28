"""`vembed push RUN OWNER/NAME`: a trained model on the Hugging Face hub, with its card and nothing else of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.options import WRITING_HEADINGS, TrustOptions, check, parse_words
from vembed.errors import ExitCode
from vembed.evaluation.keys import CardKeys
from vembed.redact import redact
from vembed.section import option, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class PushOptions(CardKeys, TrustOptions):
    """Send a trained model to the Hugging Face hub: the folder that `vembed export` writes, with a card that tells what
    was measured. Checkpoints, logs and data stay here. The repository is private unless you say --public.
    """  # noqa: D205 - the sentence that --help prints

    headings = WRITING_HEADINGS

    model: str = word("RUN_OR_MODEL", "output folder of a run, or folder of a model")
    repo: str = word("OWNER/NAME", "repository of the hub; created if it doesn't exist")
    public: bool = option(False, "let everyone see it; default: private")
    dry_run: bool = option(False, "show what would be sent, and send nothing")
    revision: str | None = option(None, "branch to send to; default: main", metavar="BRANCH")
    message: str | None = option(None, "message of the commit", metavar="TEXT")


OPTIONS = PushOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Send a trained model with its card to the Hugging Face hub."""
    given = parse_words(PushOptions, arguments, program=program)
    return run_command(lambda: _run(given))


def _run(given: Mapping[str, Any]) -> int:
    options = check(PushOptions, given)
    from vembed.pages.text import bytes_text
    from vembed.plugins.push.push import push_model

    quiet_libraries()
    # A signal ends the command where it stands, in the middle of the upload too: the hub shows nothing before its end.
    pushed = push_model(
        options.model,
        options.repo,
        keys=options.model_keys("unnamed"),
        owner=options,
        public=options.public,
        dry_run=options.dry_run,
        revision=options.revision,
        message=options.message,
    )
    # Also after a dry run, whose list is what would go.
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
    return ExitCode.OK
