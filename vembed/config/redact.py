"""Keep secrets out of messages and files: what a URL carries for a server is nobody else's to read."""

import re

MASK = "***"

_SHOWN_CHARACTERS = 80

_USER_INFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/\\\s?#]*@", re.IGNORECASE)
_SECRET_WORD = r"(?:token|passw(?:or)?d|secret|api[_-]?key|credential|signature)"
_SECRET_PARAMETER = re.compile(rf"(?P<name>[?&][\w.-]*{_SECRET_WORD}[\w.-]*=)[^&#\s'\"]*", re.IGNORECASE)
_SECRET_NAME = re.compile(_SECRET_WORD, re.IGNORECASE)


def redact(text: str) -> str:
    """Replace user info and secret query parameters of every URL in a text: `https://***@host/x?token=***`."""
    text = _USER_INFO.sub(rf"\g<scheme>{MASK}@", text)
    return _SECRET_PARAMETER.sub(rf"\g<name>{MASK}", text)


def redact_value(value: object) -> object:
    """Redact every text in a value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_value(name): redact_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(part) for part in value]
    return value


def names_secret(name: str) -> bool:
    """Tell whether a key that nobody knows looks as if its value were a secret."""
    return _SECRET_NAME.search(name) is not None


def printable(text: str) -> str:
    r"""Make a text fit for one line of a message: redacted, and free of characters that could forge another line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in redact(text))


def shown(text: str) -> str:
    """Make a user's own text, such as a key or an override, fit for a message."""
    line = printable(text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
