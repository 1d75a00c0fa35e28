"""`builtin:stdlib-code`: find the function of Python's standard library that a docstring describes.

1. Read every module of the installed library, tests excluded, without importing it.
2. A function with a docstring of 3 words or more gives a pair: its first paragraph is the query; its source, docstring
   removed and own name masked, is the document.
3. A pair whose query or document came before is dropped, so that no content stands in two splits.
4. The split is decided by a hash of the top-level module's name: one package never straddles two splits.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import textwrap
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vembed.batch import content_id
from vembed.data.builtin import BuiltinSet, role_by_hash
from vembed.data.keys import SPLIT_NAMES
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.errors import MachineError
from vembed.text import plural

if TYPE_CHECKING:
    from vembed.data.keys import Role

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"}
)
MIN_QUERY_WORDS = 3
MIN_BODY_LINES = 2
MASK = "FUNC"
"""Stands for a function's name in its source: a name often repeats the docstring's words, and would give it away."""


class Pair(NamedTuple):
    """Docstring and source of a function, and where it stands."""

    query: str
    document: str
    file: str
    line: int


def load(role: Role) -> LoadedRecords:
    """Return one split of the set.

    Raises:
        MachineError: This Python has no sources of its standard library.
    """
    pairs, num_unparsed, num_duplicates = read_library(sysconfig.get_path("stdlib"))
    writer = RecordWriter()
    for pair in pairs:
        if role_by_hash(pair.file.partition("/")[0].removesuffix(".py")) == role:
            writer.add(pair.query, positives=[pair.document], file=pair.file, line=pair.line)
    if not len(writer):
        msg = (
            f"builtin:stdlib-code needs the sources of Python's standard library, and {sysconfig.get_path('stdlib')} "
            "has none: use a Python installed with its .py files"
        )
        raise MachineError(msg)
    version = ".".join(str(part) for part in sys.version_info[:3])
    facts = (
        f"stdlib-code/{SPLIT_NAMES[role][0]}: {len(writer):,} of {len(pairs):,} pairs from the standard "
        f"library of Python {version}; {plural(num_duplicates, 'duplicate')} dropped."
    )
    notes = [facts]
    if num_unparsed:
        notes.append(f"{plural(num_unparsed, 'file')} of the standard library could not be parsed.")
    return LoadedRecords(writer.finish(), tuple(notes))


@lru_cache(maxsize=1)  # a run asks for two or three splits; parsing takes seconds
def read_library(folder: str) -> tuple[tuple[Pair, ...], int, int]:
    """Read all modules below a folder but tests.

    Returns:
        The pairs in order of the modules' paths, no content twice; the number of files that could not be parsed; and
        the number of pairs that were left out as duplicates.
    """
    root = Path(folder)
    files = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not path.name.startswith("test_") and not EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    }
    pairs: list[Pair] = []
    seen_queries: set[int] = set()
    seen_documents: set[int] = set()
    num_unparsed = num_duplicates = 0
    for name in sorted(files):  # the order decides which of two equal pairs stays
        # Templates and code of another Python may not parse; a note counts such files.
        try:
            pairs_of_file = pairs_of(files[name].read_text(encoding="utf-8"), name)
        except (SyntaxError, ValueError):
            num_unparsed += 1
            continue
        for pair in pairs_of_file:
            query, document = content_id(pair.query), content_id(pair.document)
            if query in seen_queries or document in seen_documents:
                num_duplicates += 1
                continue
            seen_queries.add(query)
            seen_documents.add(document)
            pairs.append(pair)
    return tuple(pairs), num_unparsed, num_duplicates


def pairs_of(source: str, file: str) -> list[Pair]:
    """Return the pairs of a module's functions, nested ones too, in order of their lines.

    Raises:
        SyntaxError: The module can't be parsed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings are not the user's concern
        stack: list[ast.AST] = [ast.parse(source)]
    lines = source.splitlines(keepends=True)
    pairs = []
    while stack:  # only statements are walked, which is twice as fast as `ast.walk`
        node = stack.pop()
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            stack += getattr(node, block, ())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pair = _pair_of(node, lines, file)
            if pair is not None:
                pairs.append(pair)
    return sorted(pairs, key=lambda pair: pair.line)


def _pair_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], file: str) -> Pair | None:
    """Return a function's pair, or None when it describes too little or does too little."""
    query = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if len(query.split()) < MIN_QUERY_WORDS or len(node.body) < 2 or "\0" in query:
        return None
    docstring, first = node.body[0], node.body[1]
    # The lines after the docstring, comments included; a statement on the docstring's own line isn't worth the trouble.
    if docstring.end_lineno is None or first.lineno <= docstring.end_lineno:
        return None
    # Cut out of the source by lines, since `ast.unparse` would drop comments and the author's layout.
    signature = "".join(lines[node.lineno - 1 : docstring.lineno - 1])
    body = "".join(lines[docstring.end_lineno : node.end_lineno]).strip("\n")
    if not signature or sum(bool(line.strip()) for line in body.splitlines()) < MIN_BODY_LINES:
        return None
    source = textwrap.dedent(f"{signature.rstrip()}\n{body}")
    document = re.sub(rf"\b{re.escape(node.name)}\b", MASK, source).strip()
    return Pair(query, document, file, node.lineno)


SET = BuiltinSet(load)
