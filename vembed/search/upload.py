"""Read what a browser's form sends as multipart/form-data: a few short fields and one file, all in memory.

Source: RFC 7578, and the escapes of names in the HTML standard, "Multipart form data".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from email.message import Message

MAX_PARTS = 8
MAX_HEADER_BYTES = 4_096
MAX_FIELD_BYTES = 16_384
MAX_NAME_CHARACTERS = 200
FORM_TYPE = "multipart/form-data"
_DISPOSITION = re.compile(
    r'^content-disposition:\s*form-data;\s*name="(?P<name>[^"\r\n]*)"(?:;\s*filename="(?P<file>[^"\r\n]*)")?',
    re.IGNORECASE | re.MULTILINE,
)
_ESCAPES = {"%22": '"', "%0D": " ", "%0A": " "}


class UploadError(ValueError):
    """Why what was sent is no form."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of a form.

    Attributes:
        name: What the sender calls it, for people: at most `MAX_NAME_CHARACTERS` characters, without folders.
        content: Its bytes.
    """

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """A form that was sent.

    Attributes:
        fields: Name -> text.
        files: Name -> file; a field of files in which none was chosen is left out.
    """

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, Upload] = field(default_factory=dict)


def boundary_of(content_type: str | None) -> bytes:
    """Return the line that stands between the parts of a form.

    Args:
        content_type: The header of the request.

    Raises:
        UploadError: It is of something else than such a form.
    """
    header = Message()
    header["Content-Type"] = (content_type or "").replace("\r", " ").replace("\n", " ")
    boundary = header.get_param("boundary")
    if header.get_content_type() != FORM_TYPE or not isinstance(boundary, str):
        raise UploadError(f"A picture is sent as {FORM_TYPE}.")
    if not 1 <= len(boundary) <= 70 or not boundary.isascii():
        raise UploadError("The form's boundary isn't one.")
    return b"--" + boundary.encode()


def read_form(body: bytes, boundary: bytes) -> Form:
    """Take a form apart.

    Args:
        body: All of it.
        boundary: What `boundary_of` returned.

    Raises:
        UploadError: It is cut off, has too many parts, or isn't a form.
    """
    form = Form()
    if not body.startswith(boundary):
        raise UploadError("The form is broken: it doesn't start with its boundary.")
    start = len(boundary)
    for _ in range(MAX_PARTS):
        if body[start : start + 2] == b"--":
            return form
        stop = body.find(b"\r\n" + boundary, start)
        if stop < 0 or body[start : start + 2] != b"\r\n":
            raise UploadError("The form is broken: it ends too early.")
        _add_part(form, body, start + 2, stop)
        start = stop + 2 + len(boundary)
    raise UploadError(f"The form has too many parts; at most {MAX_PARTS} are read.")


def _add_part(form: Form, body: bytes, start: int, stop: int) -> None:
    end = body.find(b"\r\n\r\n", start, min(stop + 2, start + MAX_HEADER_BYTES))
    if end < 0:
        raise UploadError("A part of the form has no header.")
    found = _DISPOSITION.search(body[start:end].decode("utf-8", "replace"))
    if found is None:
        raise UploadError("A part of the form has no name.")
    name, file = found["name"], found["file"]
    content = body[end + 4 : stop]
    if file is None:
        if len(content) > MAX_FIELD_BYTES:
            raise UploadError(f"A field of the form has {len(content):,} bytes; at most {MAX_FIELD_BYTES:,} are read.")
        form.fields[name] = content.decode("utf-8", "replace")
    elif file or content:  # a browser sends neither where nothing was chosen
        form.files[name] = Upload(_file_name(file), content)


def _file_name(name: str) -> str:
    for escape, character in _ESCAPES.items():
        name = name.replace(escape, character)
    return re.split(r"[/\\]", name)[-1][:MAX_NAME_CHARACTERS] or "picture"
