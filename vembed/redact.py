"""Keep secrets out of what people read: messages, plans, logs, reports and the configuration that a run writes down.

Every pattern is bounded, so that no text takes more than a moment.
"""

import logging
import re

MASK = "***"

_SHOWN_CHARACTERS = 80

_SECRET_WORD = r"(?:token|passw(?:or)?d|secret|api[_-]?key|credential|signature)"
_SECRET_NAME = re.compile(_SECRET_WORD, re.IGNORECASE)
# `token` alone or as a service's; pad_token=, max_tokens= and their like hold no secret.
_NAME = (
    r"(?:passw(?:or)?d|pwd|passphrase|secret(?:[_-]?access)?(?:[_-]?key)?|(?:api|access|account|auth|private)[_-]?key"
    r"|client[_-]?secret|credentials?|(?:(?<![a-z_-])|access[_-]?|auth[_-]?|api[_-]?|hf[_-]?|hub[_-]?|bearer[_-]?"
    r"|refresh[_-]?|session[_-]?|security[_-]?|tracking[_-]?|user[_-]?|wandb[_-]?)token)"
)
_DIGIT_SOON = r"(?=[a-z_-]{0,100}[0-9])"  # keeps words of plain language

_SECRETS = {
    "user info of a URL; a slash, ? or # in a password that should have been encoded is part of it": (
        r"(?P<before>://)(?P<secret>[^/\\\s?#@]{0,500}(?:@[^/\\\s?#@]{0,500}){0,3}"
        r"|[^/\\\s?#:@\[]{0,100}:(?![0-9]{1,5}[/?#])[^\s@]{0,200})(?=@)"
    ),
    "parameter of a URL": (
        rf"(?P<before>[?&;][\w.-]{{0,60}}?{_SECRET_WORD}[\w.-]{{0,60}}=|[?&](?:key|sig|auth|pwd)=)"
        r"(?P<secret>[^&#\s'\";]*)"
    ),
    "name=value": rf"(?P<before>{_NAME}[\"']?\s?=\s?[\"']?)(?P<secret>[^\s'\"&;,]+)",
    "name: value, --name value": (
        rf"(?P<before>(?:{_NAME}[\"']?\s?:|--?(?:\w{{1,20}}-){{0,3}}(?:{_NAME}|token))\s?[\"']?)"
        rf"(?P<secret>\*\*\*|{_DIGIT_SOON}[^\s'\"&;,]{{6,}})"
    ),
    "header": r"(?P<before>\bauthorization[\"']?\s?[:=]\s?[\"']?(?:[a-z]{1,20}\s)?)(?P<secret>[^\s'\"]+)",
    "bearer": rf"(?P<before>\bbearer\s)(?P<secret>\*\*\*|{_DIGIT_SOON}[\w.~+/=-]{{8,}})",
    "token by its beginning, where case counts": (
        r"(?-i:\b(?P<before>hf_|AKIA|ASIA|sk[-_]|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|AIza|eyJ)"
        r"(?P<secret>\*\*\*|(?<=hf_)[A-Za-z0-9]{12,}|(?<=A[KS]IA)[A-Z0-9]{12,}"
        r"|(?<=sk[-_])(?:[a-z0-9]{1,12}[-_]){0,3}[A-Za-z0-9]{16,}[\w-]*|(?<=[hopsur]_)[A-Za-z0-9]{16,}"
        r"|(?<=github_pat_)\w{16,}|(?<=glpat-)[\w-]{16,}|(?<=xox.-)[\w-]{10,}|(?<=AIza)[\w-]{30,}"
        r"|(?<=eyJ)[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?))"
    ),
}
_PATTERNS = [re.compile(pattern, re.IGNORECASE) for pattern in _SECRETS.values()]


def redact(text: str) -> str:
    """Replace what opens a door: user info of URLs, passwords and tokens in parameters, headers and on their own.

    `https://***@host/x?token=***`
    """
    for pattern in _PATTERNS:
        # What is masked stays: a text may pass here several times, and must come out the same.
        text = pattern.sub(
            lambda found: found[0] if found["secret"].startswith(MASK) else f"{found['before']}{MASK}", text
        )
    return text


def holds_token(text: str) -> bool:
    """Tell whether a text holds a token that its beginning gives away: plain words, as of a vocabulary, never do."""
    return _PATTERNS[-1].search(text) is not None


def lacks_secret(value: object) -> bool:
    """Tell whether a value has the mask where `redact` puts it: its secret is gone."""
    if isinstance(value, str):
        return MASK in value and any(
            found["secret"].startswith(MASK) for pattern in _PATTERNS for found in pattern.finditer(value)
        )
    if isinstance(value, dict):
        return any(lacks_secret(part) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple) and any(map(lacks_secret, value))


def redact_value(value: object) -> object:
    """Redact every text in a value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_value(name): redact_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(part) for part in value]
    return value


class RedactingFormatter(logging.Formatter):
    """Leave secrets out of log lines and their tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line that is written."""
        return redact(super().format(record))


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
