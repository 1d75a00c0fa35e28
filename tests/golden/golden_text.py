"""What of an output is behaviour: texts and pages without the times, paths, versions and memory of one machine."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import platform
import re
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"\d[\d.,]*(?:e[-+\u2212]?\d+)?%?")
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "faiss-cpu", "open_clip_torch", "peft", "accelerate")
KEPT_SIBLINGS = 2
"""Rows of a table or list that stand in full; the others are hashed."""

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""How far numbers of another machine may be from those of this one."""

_QUANTITY = r"[-+\u2212]?[\d.,]+"
_BYTES = rf"{_QUANTITY} [KMGT]?i?B"
_MEASURED = [
    (re.compile(r" +\d+/s(?:  [\d:]+ left)?$"), "  #/s"),
    (re.compile(r"\[#*\+*\.*\] [\d.]+ of [\d.]+ GiB usable"), "[#] # of # GiB usable"),
    (re.compile(r"^( +time +about) [\d:]+ "), r"\1 # "),
    (re.compile(r"\d+:\d\d(?::\d\d)? for ([\d,]+ steps?): .*"), r"# for \1"),
    (re.compile(r"^ +(?:under )?\d+%  "), "#  "),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:\d\d| UTC)?"), "TIME"),
    (re.compile(r"A step took [^|\]]*"), "A step took #"),
    (re.compile(rf"peak memory {_BYTES}"), "peak memory #"),
    (re.compile(rf"against 95% of {_BYTES} = {_BYTES}"), "against 95% of # = #"),
    (re.compile(rf"{_BYTES} to spare holds the activations of {_QUANTITY} (tokens|items)"), r"# to spare holds # \1"),
    (re.compile(rf"{_BYTES} (are to spare|to spare|of memory|left|free)"), r"# \1"),
    (re.compile(rf"{_QUANTITY} ((?:samples|texts|items|tokens|queries|documents|pictures|rows)(?:/s| per second))"),
     r"# \1"),
    (re.compile(rf"{_QUANTITY} a second"), "# a second"),
    (re.compile(r"(?<![\w.])[\d.,]+ (?:µs|ms|s|min|h|seconds?|minutes?|hours?)\b(?! from)"), "# s"),
    (re.compile(r"http://(127\.0\.0\.1|localhost):\d+"), r"http://\1:PORT"),
    (re.compile(r"\bport \d+"), "port #"),
    (re.compile(r"(Python|vembed|transformers|torch|safetensors|open_clip|faiss|peft) \d+(?:\.\d+)+\S*?(?=[,.;)\s]|$)"),
     r"\1 #"),
]  # fmt: skip
_HEARTBEAT = re.compile(r"step \d+: (encoding|second pass|waiting|loss over|adding gradients|clipping)")
_SPEED = re.compile(r"time of step|Waiting for data|waiting for data|per second|Peak memory")


def fingerprint() -> dict[str, Any]:
    """Return what the last digits of a number depend on: processor, memory, libraries."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    facts = dict(re.findall(r"^(model name|flags)\s*:\s*(.*)$", cpu, re.MULTILINE))
    flags = sorted(flag for flag in facts.get("flags", "").split() if flag.startswith(("avx", "fma", "amx")))
    return {
        "cpu": facts.get("model name", platform.processor()),
        "flags": " ".join(flags),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def plain(text: str, places: dict[str, str]) -> str:
    """Return a text with names instead of paths, and marks instead of what was measured.

    Args:
        text: What the program wrote.
        places: Path of this machine -> its name, the longest first.
    """
    for path, name in places.items():
        text = text.replace(path, name)
    text = re.sub(rf"{_BYTES}\s+free\b", "# free", text)  # the plan may break the line there
    return "\n".join(_plain_line(line) for line in text.split("\n"))


def _plain_line(line: str) -> str:
    for pattern, mark in _MEASURED:
        line = pattern.sub(mark, line)
    return masked(line) if _SPEED.search(line) else line


def masked(line: str) -> str:
    """Return what a line about speed or memory says whatever the machine: no numbers, no course of a curve."""
    line = re.sub("[▁▂▃▄▅▆▇█]+", "~", NUMBER.sub("#", line).replace("under #", "#"))
    return re.sub(r"From # .*?highest # .*?at step #\.?|# \w* ?throughout\.?", "COURSE", line)


def page_lines(html: str, places: dict[str, str]) -> list[str]:
    """Return a page as one line for each node: tag, attributes that mean something, text."""
    parser = _Page(places)
    parser.feed(html)
    parser.close()
    parser.flush()
    return _folded(parser.lines)


def _folded(lines: list[str]) -> list[str]:
    """Put the text of a node beside its tag, and hashes for the rows of a list or table after the second."""
    joined: list[str] = []
    for number, line in enumerate(lines):
        deeper = _depth(line) > _depth(joined[-1]) if joined else False
        is_only = number + 1 == len(lines) or _depth(lines[number + 1]) < _depth(line)
        if line.lstrip().startswith("| ") and deeper and is_only and "| " not in joined[-1]:
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return _fold_children(joined)


def _fold_children(joined: list[str]) -> list[str]:
    """Replace the third and later of like siblings by their number and hashes."""
    kept: list[str] = []
    position = 0
    while position < len(joined):
        end = _end_of_node(joined, position)
        siblings = [position]
        if re.match(r" *<(tr|li|div|dt|article)>", joined[position]):
            tag = _tag(joined[position])
            while end < len(joined) and _depth(joined[end]) == _depth(joined[position]) and _tag(joined[end]) == tag:
                siblings.append(end)
                end = _end_of_node(joined, end)
        if len(siblings) > KEPT_SIBLINGS + 1 and not any(
            "<section>" in line or " id=[" in line for line in joined[position:end]
        ):
            kept += _folded_nodes(joined[position : siblings[KEPT_SIBLINGS]])
            rest = joined[siblings[KEPT_SIBLINGS] : end]
            more = f"... {len(siblings) - KEPT_SIBLINGS} more {_tag(rest[0])}, {len(rest)} lines"
            kept.append(f"{' ' * _depth(rest[0])}{more} {hashes(rest)}")
            position = end
        else:
            kept.append(joined[position])
            position += 1
    return kept


def _folded_nodes(lines: list[str]) -> list[str]:
    """Fold within each of the first nodes of a list, which stay."""
    nodes: list[str] = []
    position = 0
    while position < len(lines):
        end = _end_of_node(lines, position)
        nodes += [lines[position], *_fold_children(lines[position + 1 : end])]
        position = end
    return nodes


def hashes(lines: list[str]) -> str:
    """Return two hashes of lines, in letters: of everything but their numbers, and of everything."""
    text = "\n".join(lines)
    form, whole = (digest(each)[:12].translate(_LETTERS) for each in (NUMBER.sub("#", text), text))
    return f"form={form} sha={whole}"


_LETTERS = str.maketrans("0123456789", "ghijklmnop")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _tag(line: str) -> str:
    return line.split(maxsplit=1)[0]


def _end_of_node(lines: list[str], position: int) -> int:
    """Return where the node that begins at a line ends."""
    end = position + 1
    while end < len(lines) and _depth(lines[end]) > _depth(lines[position]):
        end += 1
    return end


class _Page(HTMLParser):
    """Writes a line for each node; drawings, styles and pictures are marks."""

    VOID = frozenset({"meta", "link", "img", "input", "br", "hr", "source", "wbr", "col"})
    OPAQUE = frozenset({"svg", "style", "script"})
    LEFT_OUT = frozenset({"style", "xmlns"})

    def __init__(self, places: dict[str, str]) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self._places = places
        self._open: list[tuple[str, bool]] = []  # tag, whether its numbers are measurements
        self._text: list[str] = []
        self._measured_figure = False
        self._hidden = 0  # tags that are open within a drawing or style

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden:
            self._hidden += tag not in self.VOID
            return
        self.flush()
        self._write(" ".join([f"<{tag}>", *self._attributes(attrs)]))
        if tag in self.OPAQUE:
            self._hidden = 1
        elif tag not in self.VOID:
            measured = dict(attrs).get("id") == "speed" or any(each for _, each in self._open)
            self._open.append((tag, measured))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self._hidden:
            self.handle_starttag(tag, attrs)
            if tag not in self.VOID:
                self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            self._hidden -= tag not in self.VOID
            return
        self.flush()
        self._measured_figure &= tag != "figure"
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._text.append(data)

    def flush(self) -> None:
        """Write the text since the last tag."""
        text = " ".join("".join(self._text).split())
        self._text.clear()
        if text:
            self._write(f"| {text}")

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> list[str]:
        shown = []
        for name, value in sorted(attrs):
            text = value or ""
            if name in self.LEFT_OUT:
                continue
            if name == "class":
                text = " ".join(sorted(text.split()))
            if text.startswith("data:"):
                text = text.partition(",")[0]
            text = re.sub(r"'sha256-[^']*'", "'sha256-#'", text)
            shown.append(name if value is None else f"{name}=[{' '.join(text.split())}]")
        return shown

    def _write(self, line: str) -> None:
        line = plain(line, self._places)
        if line.startswith("<figure>"):
            self._measured_figure = False
        self._measured_figure |= line.startswith("| ") and _SPEED.search(line) is not None
        if self._measured_figure or (self._open and self._open[-1][1]):
            line = masked(line)
        self.lines.append(" " * len(self._open) + line)


def text_lines(text: str, places: dict[str, str]) -> list[str]:
    """Return the lines of a text, as `plain`, without those that a slow machine adds."""
    lines = plain(text, places).split("\n")
    return [line.rstrip() for line in lines if not _HEARTBEAT.match(line)]


def digest(content: bytes | str) -> str:
    """Return a short hash of a content."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def differences(expected: Any, found: Any, *, exact: bool, where: str = "") -> list[str]:
    """Say what of two JSON values differs, a sentence for each place.

    Args:
        expected: The frozen value.
        found: What the program wrote now.
        exact: Whether numbers and hashes must be the same to the last bit, as on the machine that froze them.
            Otherwise numbers agree to a relative 1e-3, texts but for their numbers, and hashes (keys that end in
            `sha256`) aren't compared.
        where: Place of the values.
    """
    if not exact and where.rpartition(".")[2] in OF_RANKINGS:
        expected, found = frame(expected), frame(found)
    if isinstance(expected, dict) and isinstance(found, dict):
        return _different_mappings(expected, found, exact=exact, where=where)
    if isinstance(expected, list) and isinstance(found, list):
        if all(isinstance(each, str) for each in (*expected, *found)):
            return _different_lines(expected, found, exact=exact, where=where)
        if len(expected) != len(found):
            return [f"{where}: {len(expected)} entries became {len(found)}"]
        return [
            each
            for number, (one, other) in enumerate(zip(expected, found, strict=True))
            for each in differences(one, other, exact=exact, where=f"{where}[{number}]")
        ]
    if _is_number(expected) and _is_number(found) and not exact:
        equal = math.isclose(expected, found, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    elif isinstance(expected, str) and isinstance(found, str) and not exact:
        equal = _form(expected) == _form(found)
    else:
        equal = expected == found and isinstance(expected, bool) == isinstance(found, bool)
    return [] if equal else [f"{where}:\n    was {expected!r}\n    is  {found!r}"]


OF_RANKINGS = frozenset(
    {"report", "evaluations", "rankings", "page", "markdown", "json", "terminal", "texts", "pictures"}
)
"""Parts that hold rankings, which rounding can turn over: on another machine their frame is compared."""


def frame(value: Any) -> Any:
    """Return what a value is made of: its keys, its kinds of values, of a page the kinds of nodes."""
    if isinstance(value, dict):
        return {key: frame(part) for key, part in value.items()}
    if isinstance(value, list):
        kinds = {json.dumps(frame(part)) for part in value}
        return sorted(kinds)
    if isinstance(value, str):
        node = re.match(r" *(<\w+>)(?:.* (class=\[[^\]]*\]))?", value)
        return " ".join(each or "" for each in node.groups()) if node else ""
    return type(value).__name__ if isinstance(value, bool) else "number" if _is_number(value) else value


def _form(text: str) -> str:
    """Return a text without its numbers and without hashes of numbers."""
    return NUMBER.sub("#", re.sub(r" sha=\w+", "", text))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _different_mappings(expected: dict[str, Any], found: dict[str, Any], *, exact: bool, where: str) -> list[str]:
    lines = []
    for key in [*expected, *(key for key in found if key not in expected)]:
        place = f"{where}.{key}" if where else key
        if not exact and key.endswith("sha256"):
            continue
        if key not in found:
            lines.append(f"{place}: gone, was {str(expected[key])[:200]}")
        elif key not in expected:
            lines.append(f"{place}: new, {str(found[key])[:200]}")
        else:
            lines += differences(expected[key], found[key], exact=exact, where=place)
    return lines


def _different_lines(expected: list[str], found: list[str], *, exact: bool, where: str) -> list[str]:
    one, other = (lines if exact else [_form(line) for line in lines] for lines in (expected, found))
    if one == other:
        return []
    changes = list(difflib.unified_diff(one, other, "was", "is", n=2, lineterm=""))[2:]
    shown = changes if len(changes) <= 40 else [*changes[:40], f"... and {len(changes) - 40} more lines"]
    return [f"{where}:\n" + "\n".join(f"    {line}" for line in shown)]


if __name__ == "__main__":
    sys.stdout.write("\n".join(page_lines(Path(sys.argv[1]).read_text("utf-8"), {})) + "\n")
