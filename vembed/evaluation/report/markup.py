"""HTML that can't be injected into: text is escaped unless it is already `Html`, and only this file makes `Html`.

`element` is the one builder. A plain `str` child or attribute is shown as text, whatever it holds; joining `Html` with
`+` or `format` falls back to plain `str`, so that a slip shows tags on the page instead of running them.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from vembed.evaluation.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

Html = Markup

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
_INLINE_PICTURE = re.compile(r"data:image/webp;base64,[A-Za-z0-9+/]+={0,2}")


def escape(text: str) -> Html:
    """Return a text as markup that shows it; what is markup already stays."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text), quote=True))


def join(parts: Iterable[str], separator: str = "") -> Html:
    """Return the parts one after the other, each escaped unless it is markup."""
    return Html(escape(separator).join(escape(part) for part in parts))


def element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """Return an element.

    Args:
        name: Tag name.
        children: Texts, which are escaped, and markup.
        attributes: `class_` and `aria_label` stand for `class` and `aria-label`; None and False leave one out, True
            gives one without a value. Handlers (`on...`) and `style` don't exist here; `src` holds a picture itself.

    Returns:
        The element as markup.

    Raises:
        ValueError: A name that isn't a plain tag or attribute name, or a `src` that is an address.
    """
    written = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if not _NAME.fullmatch(attribute) or attribute.lower().startswith("on") or attribute == "style":
            raise ValueError(f"{attribute!r} is not an attribute that a report may have.")
        if attribute.lower() == "src" and not _INLINE_PICTURE.fullmatch(str(value)):
            raise ValueError("The src of a report's picture is the picture itself, not an address.")
        if value is True:
            written.append(f" {attribute}")
        elif value is not None and value is not False:
            written.append(f' {attribute}="{html.escape(visible(str(value)), quote=True)}"')
    if not _NAME.fullmatch(name) or name.lower() == "script":
        raise ValueError(f"{name!r} is not an element that a report may have.")
    opening = f"<{name}{''.join(written)}>"
    return Html(opening if name in _VOID else f"{opening}{join(children)}</{name}>")
