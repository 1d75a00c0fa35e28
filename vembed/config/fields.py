"""What a key of the schema is made of: its type with bounds, its documentation, and the rules between keys."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

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


ANY: tuple[object, ...] = ()
"""In `acts_with`: any value but null."""


class Section(BaseModel):
    """A group of keys: strict, frozen, without unknown ones."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a path may hold a password
        protected_namespaces=(),  # model_name is ours
        defer_build=True,  # most sections are only parts of Config: their own validators are never asked
    )


def key(
    default: Any,
    meaning: str,
    *,
    unit: str | None = None,
    on_resume: OnResume = "refused",
    choices: Sequence[str] = (),
    form: str | None = None,
    acts_with: Mapping[str, Sequence[object]] | None = None,
) -> Any:
    """Declare a key of a section.

    Args:
        default: The one default, or `...` for a required key.
        unit: What the number counts.
        choices: The only texts allowed, for a key with more of them than a Literal shows well.
        form: How `choices` are described, instead of listing them.
        acts_with: Other key -> its values with which this one has an effect, the one to advise first; {"minimum": 2}
            stands for 2 and more.
    """
    extra: dict[str, Any] = {"on_resume": on_resume}
    if unit is not None:
        extra["unit"] = unit
    if acts_with is not None:
        extra["acts_with"] = {name: list(values) for name, values in acts_with.items()}
    pattern = None
    if choices:
        extra |= {"choices": list(choices), "form": form or ", ".join(choices)}
        pattern = f"^({'|'.join(choices)})$".replace("+", r"\+")
    return Field(default, description=meaning, pattern=pattern, json_schema_extra=extra)


def facts_of(info: FieldInfo) -> dict[str, Any]:
    """Return what `key` was told beside type, default and meaning."""
    assert isinstance(info.json_schema_extra, dict)  # every key is made by `key`
    return info.json_schema_extra


class Rule(NamedTuple):
    """A combination of keys that can't be run."""

    keys: tuple[str, ...]  # those that it reads, the one to blame first
    summary: str  # one sentence for the reference
    check: Callable[[Any], str | None]  # Config -> a sentence with the fix, None when the combination is fine


RULES: list[Rule] = []
"""Every rule that is written as a function, in the order of its definition."""


def rule(*keys: str) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register a check between keys; its docstring is the sentence of the reference."""

    def register(check: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        RULES.append(Rule(keys, (check.__doc__ or "").strip(), check))
        return check

    return register


def idle_rules(
    fields: Mapping[str, FieldInfo],
    hints: Mapping[str, Callable[[Any, str], str]],
    further: Mapping[str, tuple[tuple[str, ...], Callable[[Any], Sequence[object]]]],
) -> list[Rule]:
    """Return a rule for each key that acts only with some values of another.

    A key that has its default, is false or null asks for nothing, and is never refused; one that is true by default
    has no rule.

    Args:
        hints: Other key -> function from a Config and the key without effect to the end of its message, often empty.
        further: Other key -> keys that it has further values from, and a function from a Config to all its values.
    """
    return [
        _idle_rule(name, info.get_default(), other, values, hints.get(other), *further.get(other, ((), None)))
        for name, info in fields.items()
        for other, values in facts_of(info).get("acts_with", {}).items()
        if info.get_default() is not True
    ]


def _idle_rule(
    name: str,
    default: object,
    other: str,
    values: Sequence[object],
    hint: Callable[[Any, str], str] | None,
    further: tuple[str, ...],
    every_value: Callable[[Any], Sequence[object]] | None,
) -> Rule:
    allowed = " or ".join(map(word, values))

    def check(config: Any) -> str | None:
        value, present = getattr(config, name), getattr(config, other)
        asks = value != default and value is not None and value is not False
        every = (present,) if every_value is None else every_value(config)
        acts = any(_fits(one, each) for one in every for each in values) if values else present is not None
        if not asks or acts:
            return None
        if not values:
            return f"{name} has no effect without {other}; remove it or set {other}"
        end = "" if hint is None else hint(config, name)
        return f"{name} has no effect with {other} {word(present)}; remove it or set {other} to {allowed}{end}"

    needed = f"`{other}: {allowed}`" if values else f"`{other}`"
    return Rule((name, other, *further), f"`{name}` has an effect only with {needed}.", check)


def _fits(value: Any, wanted: object) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(value, int) and value >= wanted["minimum"]
    return bool(value == wanted)


def word(value: object) -> str:
    """Return a scalar as a configuration file writes it."""
    if isinstance(value, Mapping):
        return f"{value['minimum']} or more"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


class BrokenRules(ValueError):  # noqa: N818
    """Rules that a Config breaks, each with its keys, so that a loader can say where they were set."""

    def __init__(self, broken: Sequence[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(sentence for _, sentence in broken))
        self.broken = tuple(broken)
