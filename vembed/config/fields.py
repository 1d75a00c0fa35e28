"""What a key of the schema is made of: its type with bounds, its documentation, and the rules between keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

OnResume = Literal["harmless", "refused"]
"""What a changed value means for a run that is resumed."""

Auto = Literal["auto"]
"""The plan decides."""


def _storable(text: str) -> str:
    if "\0" in text:
        msg = "must not hold a NUL character"
        raise ValueError(msg)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = "must be valid Unicode; it holds half of a surrogate pair"
        raise ValueError(msg) from error
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        msg = "must not be blank"
        raise ValueError(msg)
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""A text, possibly empty."""

Name = Annotated[str, AfterValidator(_storable), AfterValidator(_not_blank)]
"""A text that names something: a model, a path, a split."""

LARGEST_COUNT = 2**31 - 1
"""Bound of every count, so that no sum or product of a few of them leaves 64 bits."""

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def key(
    default: Any,
    meaning: str,
    *,
    unit: str | None = None,
    on_resume: OnResume = "refused",
    choices: Sequence[str] = (),
    form: str | None = None,
) -> Any:
    """Declare a key of the schema.

    Args:
        default: The one default, or `...` for a required key.
        meaning: One line for the reference.
        unit: What the number counts.
        on_resume: Whether a resumed run may change it.
        choices: The only texts allowed, for a key with more of them than a Literal shows well.
        form: How `choices` are described, instead of listing them.

    Returns:
        A pydantic field; `Any`, as it stands where a value of the key's type is expected.
    """
    extra: dict[str, Any] = {"on_resume": on_resume}
    if unit is not None:
        extra["unit"] = unit
    pattern = None
    if choices:
        extra |= {"choices": list(choices), "form": form or ", ".join(choices)}
        pattern = f"^({'|'.join(choices)})$"
    return Field(default, description=meaning, pattern=pattern, json_schema_extra=extra)


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination of keys that can't be run.

    Attributes:
        keys: The keys that it reads, the one to blame first.
        summary: One sentence for the reference.
        check: Maps a Config to a sentence with the fix, or to None when the combination is fine.
    """

    keys: tuple[str, ...]
    summary: str
    check: Callable[[Any], str | None]


RULES: list[Rule] = []
"""Every rule of the schema, in the order of its definition."""


def rule(*keys: str) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register a check between keys; its docstring is the sentence of the reference.

    Args:
        *keys: The keys that the check reads, the one to blame first.

    Returns:
        A decorator that leaves the function as it is.
    """

    def register(check: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        RULES.append(Rule(keys, (check.__doc__ or "").strip(), check))
        return check

    return register


class BrokenRules(ValueError):  # noqa: N818
    """Rules that a Config breaks, each with its keys, so that a loader can say where they were set."""

    def __init__(self, broken: Sequence[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(sentence for _, sentence in broken))
        self.broken = tuple(broken)
