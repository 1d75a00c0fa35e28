"""Fit the documents to the site: files outside docs/ become pages, notebooks too, and file names title their blocks.

The documents are written for a plain Git host, where a relative link may lead to any file of the repository.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "benchmarks/RESULTS.md")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#\s])")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that the navigation doesn't name at its end, so that each can be found."""
    folder = Path(config.docs_dir)
    named = set(named_pages(config.nav))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    there |= {page_of(path.relative_to(ROOT).as_posix()) for path in folder.rglob("*.ipynb")}
    if others := sorted(there - named):
        config.nav = [*(config.nav or []), {"More": others}]
    return config


def named_pages(entry: object) -> list[str]:
    """Return the pages of a part of the navigation."""
    if not isinstance(entry, list | dict):
        return [str(entry)]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [page for each in inside for page in named_pages(each)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that a document links to, and for each notebook."""
    for name in PROJECT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text("utf-8")))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = File.generated(
            config, page_of(notebook.src_uri), content=notebook_text(Path(notebook.abs_src_path or ""))
        )
        files.append(page)
    wanted = [path for file in files.documentation_pages() for path in linked(file)]
    added: dict[str, str] = {}
    while wanted:
        path = wanted.pop()
        if path not in added and page_of(path).startswith("source/"):
            children = listed(ROOT / path)
            wanted += children
            added[path] = folder_text(path, children) if (ROOT / path).is_dir() else source_text(ROOT / path)
    for path, text in added.items():
        page = File.generated(config, page_of(path), content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at the pages of the site, and let the file name of a code block be its title."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = repository_path(here, match["target"])
        if not (ROOT / path).exists() or here.startswith("source/"):
            return match["target"]
        return posixpath.relpath(page_of(path), posixpath.dirname(here) or ".")

    text = LINK.sub(moved, markdown)
    text = re.sub(r"^(```\w+) (\S+\.\w+)$", r'\1 title="\2"', text, flags=re.MULTILINE)
    return re.sub(r"^(```\w+) [^=\n]*$", r"\1", text, flags=re.MULTILINE)


def repository_path(page: str, target: str) -> str:
    """Return what a link of a page leads to, from the root of the repository."""
    folder = posixpath.dirname(page if page in PROJECT_PAGES else posixpath.join("docs", page))
    return posixpath.normpath(posixpath.join(folder, target))


def page_of(path: str) -> str:
    """Return the page that shows a path of the repository, from docs/."""
    if path == "README.md":
        return "index.md"
    if path in PROJECT_PAGES:
        return path
    inside = path.removeprefix("docs/")
    if inside.endswith(".ipynb"):
        return inside.removesuffix(".ipynb") + ".md"
    return inside if path.startswith("docs/") else f"source/{path}.md"


def linked(file: File) -> list[str]:
    """Return what the links of a page lead to outside docs/."""
    paths = {repository_path(file.src_uri, match["target"]) for match in LINK.finditer(file.content_string)}
    return sorted(path for path in paths if (ROOT / path).exists() and page_of(path).startswith("source/"))


def listed(folder: Path) -> list[str]:
    """Return the files of a folder; of a file none."""
    inside = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return [path.relative_to(ROOT).as_posix() for path in inside if not path.name.startswith(".")]


def folder_text(path: str, children: list[str]) -> str:
    """Return the page of a folder: its files."""
    base = posixpath.dirname(page_of(path))
    lines = [f"- [{posixpath.basename(child)}]({posixpath.relpath(page_of(child), base)})" for child in children]
    return f"{HIDDEN}# {path}\n\n" + "\n".join(lines) + "\n"


def source_text(path: Path) -> str:
    """Return the page of a file: its text."""
    name = path.relative_to(ROOT).as_posix()
    return f"{HIDDEN}# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8').rstrip()}\n````\n"


def notebook_text(path: Path) -> str:
    """Return the page of a notebook: its cells with what they showed when it ran."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [shown(output) for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    return "\n\n".join(part for part in parts if part) + "\n"


def shown(output: dict[str, Any]) -> str:
    """Return what a cell put out: a picture, else HTML in a frame of its own, else text."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items() if isinstance(value, list | str)}
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return framed(data["text/html"])
    text = "".join(output.get("text", "")) or data.get("text/plain", "")
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


def framed(html: str) -> str:
    """Return HTML of its own as a frame, so that its styles stay with it."""
    quoted = html.replace("&", "&amp;").replace('"', "&quot;").replace("\n", "&#10;")
    return f'<iframe srcdoc="{quoted}" style="width:100%;height:32rem;border:0"></iframe>'
