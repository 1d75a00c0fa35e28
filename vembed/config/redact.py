"""Keep secrets out of messages and files: what a URL carries for a server is nobody else's to read."""

import re

MASK = "***"

_SHOWN_CHARACTERS = 80

_USER_INFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/\\\s?#]*@", re.IGNORECASE)
_SECRET_WORD = r"(?:token|passw(?:or)?d|secret|api[_-]?key|credential|signature)"
_SECRET_PARAMETER = re.compile(rf"(?P<name>[?&][\w.-]*{_SECRET_WORD}[\w.-]*=)[^&#\s'\"]*", re.IGNORECASE)
_SECRET_NAME = re.compile(_SECRET_WORD, re.IGNORECASE)


def redact(text: str) -> str:
    """Replace the user info and the secret query parameters of every URL in a text by `***`.

    Args:
        text: Any text: a path, a message, a whole file.

    Returns:
        The text; `https://user:pw@host/x?token=abc` becomes `https://***@host/x?token=***`.
    """
    text = _USER_INFO.sub(rf"\g<scheme>{MASK}@", text)
    return _SECRET_PARAMETER.sub(rf"\g<name>{MASK}", text)


def redact_value(value: object) -> object:
    """Redact every text in a value.

    Args:
        value: A scalar, or lists and mappings of scalars.

    Returns:
        An equal value with redacted texts.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_value(name): redact_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(part) for part in value]
    return value


def names_secret(name: str) -> bool:
    """Tell whether a key that nobody knows looks as if its value were a secret.

    Args:
        name: A key, e.g. `hub_token`.

    Returns:
        True when its value must not be shown.
    """
    return _SECRET_NAME.search(name) is not None


def printable(text: str) -> str:
    r"""Make a text fit for one line of a message: redacted, and free of characters that could forge another line.

    Args:
        text: A text with parts that a user wrote.

    Returns:
        The text with escapes such as `\n` in place of what isn't printable.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in redact(text))


def shown(text: str) -> str:
    """Make a user's own text, such as a key or an override, fit for a message.

    Args:
        text: A text of any length.

    Returns:
        The printable text, cut after 80 characters.
    """
    line = printable(text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
