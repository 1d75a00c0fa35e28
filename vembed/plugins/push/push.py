"""A trained model on the Hugging Face hub: its folder, its card, and nothing else of the run.

1. The model of a run is exported into a folder that is gone afterwards, with a card whose examples load it from the
   hub. A model's folder with a card of ours, as `vembed export` writes it, is sent as it is; any other card may quote
   rows, and the model is exported anew.
2. Files that belong to no model stay here. A file of the model that is a link is refused, unless it leads into the
   blobs of a hub cache. Every text file that is left is read for paths of this machine and for secrets.
3. The repository is made where there is none, private unless the caller says otherwise, and the folder is sent by
   huggingface_hub, which skips what arrived before. Then the hub is asked whether all of it is there, and what else
   that a loader would read.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from transformers.dynamic_module_utils import get_relative_import_files

from vembed.errors import ConfigError, MachineError
from vembed.evaluation.card import CARD_FILE
from vembed.files import is_folder
from vembed.models.composed import IMAGE, PROJECTIONS_FILE, TEXT
from vembed.models.export import SERVE_FILE, ExportRequest, export_model
from vembed.models.formats import MODULES_FILE
from vembed.models.keys import ModelKeys
from vembed.models.names import locate_model
from vembed.models.vision import HEAD_FOLDER
from vembed.redact import holds_token, redact
from vembed.section import facts_of
from vembed.workflows.publishing import card_files, spelled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.evaluation.keys import CardKeys

_log = logging.getLogger(__name__)

MODEL_FILES = (
    *("config.json", "*_config.json", "config_sentence_transformers.json", MODULES_FILE, "vembed_*.json", "*.jinja"),
    *("tokenizer*.json", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model", PROJECTIONS_FILE),
)
"""Files of a model's folders, by names, beside its weights, the card, serve.md and code that settings name."""

WEIGHTS = re.compile(
    r"(?:adapter_|open_clip_)?model(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?"
    r"|model(?:_(?:quantized|optimized|O[1-4]|fp16|q?u?int8\w*|q4\w*|bnb4))?\.onnx(?:[._]data)?"
)
"""Names of weights. A trainer's `model_optimizer.safetensors` is none of them."""

MODEL_FOLDERS = (TEXT, IMAGE, HEAD_FOLDER, "onnx", "additional_chat_templates")
"""Folders of a model that its modules.json doesn't name."""

CHANGE_VECTORS = frozenset(
    name for name, info in ModelKeys.model_fields.items() if facts_of(info).get("load") == "vectors"
)
"""Options of a model that change its vectors; the others say how it is read."""

ROOT_FILES = (CARD_FILE, SERVE_FILE)

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
LONGEST_NAME = 96

_NO_TEXT = (".safetensors", ".onnx", ".onnx_data", ".onnx.data", ".model")
_WORDS = re.compile(r"(?:.*/)?(?:tokenizer\.json|vocab\..*|merges\.txt)")
"""Files of a vocabulary: some of its words look like paths, or like the name of a password."""

_ABSOLUTE = re.compile(r"(?:[A-Za-z]:)?[/\\][^/\\\s]+[/\\]\S+|~[/\\]\S+")
_HOME = re.compile(r"(?:[A-Za-z]:)?[/\\](?:home|Users|root)[/\\][^\s\"'`<>|)]+")

_NETWORK: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base of the errors of the HTTP library underneath, which is another one by version."""

_REFUSED = {
    401: "the hub doesn't know the token: make a new one that may write, then run hf auth login, or set HF_TOKEN",
    403: "the token may not write there: use one with write access, and a namespace that you belong to",
    404: "there is no such namespace or branch, or the token may not see it",
    409: "another change came in between: look at the repository, then push again",
    413: "a file is larger than the hub takes",
    429: "the hub asks for a pause: push again in a few minutes",
}


@dataclass(frozen=True, slots=True)
class Pushed:
    """Files that were sent to the hub, or would be."""

    repo: str
    files: tuple[tuple[str, int], ...]  # path and bytes of each
    left_out: tuple[str, ...]  # files of the folder that belong to no model
    metadata: str  # the card's block for the hub
    private: bool
    url: str | None = None  # of the commit; None where nothing was sent


def push_model(
    source: str,
    repo: str,
    *,
    keys: ModelKeys,
    owner: CardKeys,
    public: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Pushed:
    """Send a model to the hub.

    Args:
        source: Output folder of a run, or folder of a model.
        repo: owner/name.
        keys: How the model is read; its name is not read.
        revision: Branch, made where there is none; None for the main one.
        message: Of the commit.

    Raises:
        ConfigError: The name or the model won't do, there is no token, or a file holds a path or a secret: nothing was
            sent. Or the hub refused; the message says how far it came.
        MachineError: The hub can't be reached, or the model can't be read back.
    """
    owner = spelled(owner)
    if not NAME.fullmatch(repo) or len(repo) > LONGEST_NAME or ".." in repo or "--" in repo:
        raise ConfigError(
            f"{repo!r} isn't a valid name on the hub: write owner/name, of letters, digits, '-', '_' and '.', at most "
            f"{LONGEST_NAME} characters, e.g. my-team/faq-search"
        )
    model, run = locate_model(source)
    if not is_folder(model):
        raise ConfigError(f"{source} is a model of the hub; name the output folder of a run, or a model's folder")
    if not dry_run and get_token() is None:
        raise ConfigError("there is no token for the hub: run hf auth login, or set HF_TOKEN; nothing was sent")
    with ExitStack() as stack:
        folder = Path(model)
        files, left_out = _model_files(folder)  # before an export, which would read what a link leads to
        keys = keys.model_copy(update={"model_name": model})
        changed = sorted(keys.model_dump(exclude_defaults=True).keys() & CHANGE_VECTORS)
        if run is None and _is_ours(folder / CARD_FILE):
            if changed:
                raise ConfigError(
                    f"{redact(str(folder))} is sent as it is, without {', '.join(changed)}: load the model without "
                    f"that, or remove {CARD_FILE} from the folder to have it exported with it. Nothing was sent"
                )
        else:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="vembed-push-"))) / "model"
            measured = None if changed else run  # its measurements are of the model as it was trained
            card = card_files(repo.partition("/")[2], repo, model, measured, owner)
            export_model(ExportRequest(keys=keys, output=folder, served_as=repo), card)
            files, left_out = _model_files(folder)
        if not any(name.endswith((".safetensors", ".onnx")) for name in files):
            raise ConfigError(f"{folder} holds no weights; name the output folder of a run, or a model's folder")
        _refuse_private_words(folder, files, Path(model))
        parcel = Pushed(
            repo=repo,
            files=tuple((name, (folder / name).stat().st_size) for name in files),
            left_out=left_out,
            metadata=_metadata(folder / CARD_FILE),
            private=not public,
        )
        return parcel if dry_run else _send(folder, parcel, public=public, revision=revision, message=message)


def _is_ours(card: Path) -> bool:
    """Return whether a card is one that vembed writes, which quotes no row."""
    if not card.is_file():
        return False
    try:
        block = yaml.safe_load(_metadata(card))
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    tags = block.get("tags") if isinstance(block, dict) else None
    return isinstance(tags, list) and "vembed" in tags


def _model_files(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of a folder that belong to a model, and the others, as paths within it.

    Raises:
        ConfigError: A file or folder of the model is a link. In a hub cache, files are links into its `blobs`.
    """
    real = folder.resolve()
    blobs = real.parents[1] / "blobs" if real.parent.name == "snapshots" else None
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    # A link may lead to any file of this machine, such as a key; only those into the blobs of a hub cache are files of
    # the model itself.
    links = {name for name, path in paths.items() if path.is_symlink() and path.resolve().parent != blobs}
    names = sorted(name for name, path in paths.items() if path.is_file() or name in links)
    # A list of what belongs, not of what doesn't: a file that nobody thought of stays here.
    code = {place: _code_files(folder / place) for place in _model_folders(folder)}
    kept = [
        name
        for name in names
        for place, _, file in [name.rpartition("/")]
        if place in code
        and (
            WEIGHTS.fullmatch(file)
            or any(fnmatch(file, pattern) for pattern in MODEL_FILES)
            or file in code[place]
            or name in ROOT_FILES
        )
        and re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name, re.ASCII)
        and not any(part.startswith((".", "checkpoint", "step-")) for part in name.split("/"))
    ]
    if linked := sorted(links & {*kept, *code}):
        raise ConfigError(
            f"{folder / linked[0]} is a link to {paths[linked[0]].readlink()}: put the file itself in its place, or "
            "remove the link. Nothing was sent"
        )
    return tuple(kept), tuple(sorted(set(names) - set(kept)))


def _model_folders(folder: Path) -> set[str]:
    """Return the folders that hold files of a model, as paths within its own; modules may have modules."""
    folders: set[str] = set()
    new = {"", *MODEL_FOLDERS}
    while new:
        folders |= new
        new = {f"{place}/{name}".lstrip("/") for place in new for name in _modules(folder / place)} - folders
    return folders


def _modules(folder: Path) -> set[str]:
    """Return the folders that a folder's own settings name as modules."""
    listed, routed = _settings(folder / MODULES_FILE), _settings(folder / "router_config.json")
    names = {module.get("path") for module in listed or () if isinstance(module, dict)}
    names.update(routed["types"] if isinstance(routed, dict) and isinstance(routed.get("types"), dict) else ())
    return {name.strip("/") for name in names if isinstance(name, str) and name.strip("/")}


def _code_files(folder: Path) -> set[str]:
    """Return the Python files that a folder's settings name, and those that they import from beside them."""
    named = [module.get("type") for module in _settings(folder / MODULES_FILE) or () if isinstance(module, dict)]
    for path in folder.glob("*config.json"):
        settings = _settings(path)
        named += _texts(settings.get("auto_map")) if isinstance(settings, dict) else ()
    heads = {folder / f"{str(name).rpartition('--')[2].partition('.')[0]}.py" for name in named}
    # With `trust_remote_code` others run what is sent: files that these don't import stay here.
    present = [head for head in heads if head.is_file()]
    return {Path(path).name for head in present for path in (str(head), *get_relative_import_files(head))}


def _settings(path: Path) -> Any:
    """Return the content of a JSON file; None where there is none, or it can't be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _refuse_private_words(folder: Path, files: tuple[str, ...], source: Path) -> None:
    """Refuse to send a file that names a path of this machine, or holds a secret.

    Raises:
        ConfigError: It names the file and the path.
    """
    # Not of the root's own folders: /data is a word of many texts.
    here = {str(path) for path in (Path.home(), source, source.parent, Path.cwd()) if len(path.parts) > 2}
    for name in files:
        if name.endswith(_NO_TEXT):
            continue
        text = (folder / name).read_text("utf-8", errors="replace")
        known = next((path for path in sorted(here, key=len, reverse=True) if path in text), None)
        is_vocabulary = _WORDS.fullmatch(name) is not None
        if known is None and not is_vocabulary:
            known = _local_path(text, is_settings=name.endswith(".json"))
        if known is None and (holds_token(text) if is_vocabulary else redact(text) != text):
            raise ConfigError(f"{name} holds what looks like a password or a token; remove it. Nothing was sent")
        if known is not None:
            raise ConfigError(f"{name} tells of this machine: {known}; remove it, or export again. Nothing was sent")


def _local_path(text: str, *, is_settings: bool) -> str | None:
    """Return a path of a machine that a file tells of: a user's folder anywhere, and any absolute path as a setting."""
    # Prose names paths as examples ("/usr/bin"); in settings an absolute path leads somewhere on this machine.
    match = _HOME.search(text)
    if match is not None or not is_settings:
        return match and match.group()
    try:
        return next((value for value in _texts(json.loads(text)) if _ABSOLUTE.fullmatch(value)), None)
    except (ValueError, RecursionError):
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _metadata(card: Path) -> str:
    """Return the block at the head of a card, empty where it has none."""
    block = re.match(r"---\n(.*?)^---$", card.read_text("utf-8", "replace"), re.DOTALL | re.MULTILINE)
    return "" if block is None else block.group(1)


def _send(folder: Path, parcel: Pushed, *, public: bool, revision: str | None, message: str | None) -> Pushed:
    repo = parcel.repo
    api = HfApi()
    with _in_plain_words(repo, "nothing was sent"):
        try:
            private = bool(api.model_info(repo).private)
        except RepositoryNotFoundError:
            api.create_repo(repo, private=not public)
            private = not public
    if not private and not public:
        raise ConfigError(f"{repo} is there and public: say --public to send the model to it. Nothing was sent")
    state = "the repository is there, without these files; push again, and what arrived isn't sent twice"
    with _in_plain_words(repo, state):
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[name for name, _ in parcel.files],
            revision=revision,
            commit_message=message or "Upload a model by vembed",
        )
        # Asked back: the hub leaves out what the repository's own .gitignore names, without an error.
        there = api.list_repo_files(repo, revision=commit.oid)
    if missing := [name for name, _ in parcel.files if name not in there]:
        raise ConfigError(
            f"{repo}: the hub took the other files and left out {', '.join(missing)}: the repository's "
            ".gitignore names them; remove those lines there, and push again"
        )
    # Nothing of a user's is deleted, but transformers takes an adapter that lies beside the weights, and one file of
    # weights before several.
    sent = {name for name, _ in parcel.files}
    read = (
        name for name in there if WEIGHTS.fullmatch(name.rpartition("/")[2]) or name.endswith("adapter_config.json")
    )
    if stale := sorted(set(read) - sent):
        _log.warning(
            "%s still holds %s, which this model hasn't; others may load it with the model: delete it there",
            repo,
            ", ".join(stale),
        )
    return Pushed(parcel.repo, parcel.files, parcel.left_out, parcel.metadata, private, commit.commit_url)


@contextmanager
def _in_plain_words(repo: str, state: str) -> Iterator[None]:
    """Say in the message of an error what the hub refused and how far the upload came.

    Args:
        state: The part of it that has happened by now.
    """
    try:
        yield
    except (HfHubHTTPError, _NETWORK, OfflineModeIsEnabled, OSError, RuntimeError, ValueError) as error:
        # huggingface_hub wraps errors of the network in its own: the innermost known one says what happened.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (_NETWORK, OfflineModeIsEnabled)):
            cause = cause.__cause__
        if isinstance(cause, OfflineModeIsEnabled):
            raise ConfigError(f"{repo}: HF_HUB_OFFLINE is set, so the hub can't be reached; {state}") from error
        if isinstance(cause, HfHubHTTPError):
            code = cause.response.status_code
            why = _REFUSED.get(code, redact(str(cause.server_message or cause).strip().partition("\n")[0]))
            kind = MachineError if code >= 500 or code == 429 else ConfigError
            raise kind(f"{repo}: the hub answers {code}: {why} ({state})") from error
        if cause is not None:
            raise MachineError(f"{repo}: the hub can't be reached: {redact(str(cause))} ({state})") from error
        raise MachineError(f"{repo}: the upload failed: {redact(str(error))} ({state})") from error
