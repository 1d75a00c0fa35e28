"""`builtin:stdlib-code`: find the function of Python's standard library that a docstring describes.

1. Read every module of the installed library, tests excluded, without importing it.
2. A function with a docstring of 3 words or more gives a pair: its first paragraph is the query; its source, docstring
   removed and own name masked, is the document.
3. A pair whose query or document came before is dropped, so that no content stands in two splits.
4. The split is decided by a hash of the top-level module's name: one package never straddles two splits.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
import textwrap
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vembed.batch import content_id
from vembed.data.builtin import BuiltinSet
from vembed.data.keys import SPLIT_NAMES
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.errors import MachineError
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.data.keys import Role

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"}
)
MIN_QUERY_WORDS = 3
MIN_BODY_LINES = 2
MASK = "FUNC"


class _Pair(NamedTuple):
    """One function: what describes it, its source, and where it stands."""

    query: str
    document: str
    file: str
    line: int


class _Library(NamedTuple):
    """All pairs of the installed library, and what was left out."""

    pairs: tuple[_Pair, ...]
    num_unparsed: int
    num_duplicates: int


def load(role: Role) -> LoadedRecords:
    """Return one split of the set.

    Raises:
        MachineError: This Python has no sources of its standard library.
    """
    library = _read_library(sysconfig.get_path("stdlib"))
    writer = RecordWriter()
    for pair in library.pairs:
        if _role_of_file(pair.file) == role:
            writer.add(pair.query, positives=[pair.document], file=pair.file, line=pair.line)
    if not len(writer):
        msg = (
            f"builtin:stdlib-code needs the sources of Python's standard library, and {sysconfig.get_path('stdlib')} "
            "has none: use a Python installed with its .py files"
        )
        raise MachineError(msg)
    version = ".".join(str(part) for part in sys.version_info[:3])
    facts = (
        f"stdlib-code/{SPLIT_NAMES[role][0]}: {len(writer):,} of {len(library.pairs):,} pairs from the standard "
        f"library of Python {version}; {plural(library.num_duplicates, 'duplicate')} dropped."
    )
    notes = [facts]
    if library.num_unparsed:
        notes.append(f"{plural(library.num_unparsed, 'file')} of the standard library could not be parsed.")
    return LoadedRecords(writer.finish(), tuple(notes))


@lru_cache(maxsize=1)  # a run asks for two or three splits; parsing takes seconds
def _read_library(folder: str) -> _Library:
    root = Path(folder)
    pairs: list[_Pair] = []
    seen_queries: set[int] = set()
    seen_documents: set[int] = set()
    num_unparsed = num_duplicates = 0
    for path in _source_files(root):
        try:
            found = _pairs_of(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
        except (SyntaxError, ValueError):
            num_unparsed += 1
            continue
        for pair in found:
            query, document = content_id(pair.query), content_id(pair.document)
            if query in seen_queries or document in seen_documents:
                num_duplicates += 1
                continue
            seen_queries.add(query)
            seen_documents.add(document)
            pairs.append(pair)
    return _Library(tuple(pairs), num_unparsed, num_duplicates)


def _source_files(root: Path) -> list[Path]:
    """Return the library's modules in order of their names; `test_x.py` and folders of tests are left out."""
    found = (path for path in root.rglob("*.py") if not path.name.startswith("test_"))
    return sorted(
        (path for path in found if not EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts[:-1])),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def _pairs_of(source: str, file: str) -> list[_Pair]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings are not the user's concern
        tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    pairs = (_pair_of(node, lines, file) for node in _functions(tree))
    return sorted((pair for pair in pairs if pair is not None), key=lambda pair: pair.line)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function, nested ones too; only statements are walked, which is twice as fast as `ast.walk`."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            stack += getattr(node, block, ())


def _pair_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], file: str) -> _Pair | None:
    """Return a function's pair, or None when it describes too little or does too little."""
    query = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if len(query.split()) < MIN_QUERY_WORDS or len(node.body) < 2 or "\0" in query:
        return None
    docstring, first = node.body[0], node.body[1]
    # What follows the docstring, comments included; a statement on the docstring's own line is not worth the trouble.
    if docstring.end_lineno is None or first.lineno <= docstring.end_lineno:
        return None
    signature = "".join(lines[node.lineno - 1 : docstring.lineno - 1])
    body = "".join(lines[docstring.end_lineno : node.end_lineno]).strip("\n")
    if not signature or sum(bool(line.strip()) for line in body.splitlines()) < MIN_BODY_LINES:
        return None
    source = textwrap.dedent(f"{signature.rstrip()}\n{body}")
    document = re.sub(rf"\b{re.escape(node.name)}\b", MASK, source).strip()
    return _Pair(query, document, file, node.lineno)


def _role_of_file(file: str) -> Role:
    """Return the split of a file's top-level module: 80% train, 10% validation, 10% test of the names."""
    module = file.partition("/")[0].removesuffix(".py")
    bucket = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little") % 10
    if bucket < 8:
        return "train"
    return "validation" if bucket == 8 else "test"


SET = BuiltinSet(load)
