"""Sections of keys: how a room declares what a user may set, with type, bounds, meaning and rules in one place.

    class AdapterKeys(Section):
        '''Weights that train: all, a part of them, or small adapters beside frozen ones.'''

        use_lora: Auto | bool = key("auto", "Freeze the model and train low-rank adapters (LoRA).")
        lora_r: Count = key(16, "Rank of the adapters.", acts_with={"use_lora": (True, "auto")})
        load_in_4bit: bool = key(False, "Hold the frozen weights in 4 bits (QLoRA).")

        rules = (
            Rule(
                "`load_in_4bit: true` needs `use_lora: true`.",
                ("load_in_4bit", "use_lora"),
                lambda config: config.load_in_4bit and config.use_lora is not True,
                "load_in_4bit freezes the model, because 4-bit weights can't be trained; set use_lora to true",
            ),
        )

Everything else is generated from such a class: the configuration and its messages, docs/configuration.md, the keyword
arguments of `vembed.train`, and the options of a command. A section imports neither torch nor numpy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vembed.text import one_of

if TYPE_CHECKING:
    from vembed.registry import Registry

Auto = Literal["auto"]
"""The plan decides."""

Affects = Literal["result", "run", "process"]
"""How far the value of a key reaches. What a hash holds, what may change on resume and what processes share follow.

result: the weights, or what is said of them. It is hashed, refused on resume, and equal on all ranks.
run: how the work is done, with the same result. It may change on resume, and is equal on all ranks: most such keys
    decide when ranks meet in a collective, and one that decided otherwise would wait for ever.
process: what one process does by itself. It may change on resume and differ from rank to rank.
"""

LARGEST_COUNT = 2**31 - 1
"""Upper bound of every count, so that no product of a few of them leaves 64 bits."""

LONGEST_NAME = 4096
"""In characters, of a name or a path: the longest path that Linux takes."""


def _storable(text: str) -> str:
    # A path ends at a NUL, and half of a surrogate pair can't be written as UTF-8: both would fail far from their key.
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be valid Unicode; it holds half of a surrogate pair") from error
    return text


def _of_a_name(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"must have at most {LONGEST_NAME:,} characters")
    return text


Text = Annotated[str, AfterValidator(_storable)]
Name = Annotated[str, AfterValidator(_storable), AfterValidator(_of_a_name)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]

ANY: tuple[object, ...] = ()
"""In `acts_with`: any value but null."""


class Registered:
    """Mark of a key whose values are registered names: metrics, trackers. Plugins add some, so both are asked anew.

    Args:
        fits: Value -> whether it is one.
        schema: The JSON schema of the values, for messages and the reference.
    """

    def __init__(self, fits: Callable[[Any], bool], schema: Callable[[], JsonSchemaValue]) -> None:
        self.fits = fits
        self.schema = schema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not an enum: it would hold the names of the time when the class was made, before plugins registered theirs.
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return self.schema()

    def _known(self, value: Any) -> Any:
        if not self.fits(value):
            raise PydanticCustomError("not_registered", "no such name")
        return value


def names_of(registry: "Registry", *ours: str) -> Registered:
    """Return the mark of a key or an option that takes a name of a registry, or one of ours that stands in none."""
    return Registered(lambda value: value in ours or value in registry, lambda: {"enum": [*ours, *registry.names()]})


@dataclass(frozen=True, slots=True)
class Rule:
    """Combination of keys that can't be run.

    `broken` gets the configuration. It returns whether the rule is broken, or the message itself where that needs
    arithmetic. In `message`, `{key}` stands for the value of a key as a file would write it.
    """

    sentence: str  # for the reference
    keys: tuple[str, ...]  # the keys that the rule reads, the one to blame first
    broken: Callable[[Any], object]
    message: str = ""  # what is wrong, and the fix

    def violation(self, config: Any) -> str | None:
        """Return the message for a configuration that breaks the rule, None for one that keeps it."""
        broken = self.broken(config)
        if not broken:
            return None
        if isinstance(broken, str):
            return broken
        # The keys that the message names and no others: `written` takes scalars, and a rule may read a mapping.
        shown = [name for name in self.keys if f"{{{name}}}" in self.message]
        return self.message.format_map({name: written(getattr(config, name)) for name in shown})


class Section(BaseModel):
    """Group of keys: frozen, strictly typed (`True` is no integer, "3" no number), without unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a path may hold a password
        protected_namespaces=(),  # model_name is a key
        defer_build=True,  # most sections are only bases of Config, and building a validator takes milliseconds
    )

    rules: ClassVar[tuple[Rule, ...]] = ()


def rules_of(section: type[Section]) -> tuple[Rule, ...]:
    """Return the rules of a section and of the sections that it is made of, in the order of the bases."""
    # From the dictionary of each class: `part.rules` would find inherited rules again in every class below.
    return tuple(rule for part in section.__mro__ for rule in part.__dict__.get("rules", ()))


def key(
    default: Any,
    meaning: str,
    *,
    unit: str | None = None,
    affects: Affects = "result",
    choices: Sequence[str] = (),
    form: str | None = None,
    acts_with: Mapping[str, Sequence[object]] | None = None,
    load: Literal["reads", "vectors"] | None = None,
) -> Any:
    """Declare a key of a section.

    Args:
        default: The one default, or `...` for a required key.
        unit: Unit of a number: "tokens", "seconds".
        affects: How far a change of the value reaches; see `Affects`.
        choices: The only texts allowed, where a Literal would be too long to read.
        form: Short description of `choices` for messages and the reference.
        acts_with: Other key -> its values with which this key has an effect, the one to advise first. {"minimum": 2}
            stands for 2 and more.
        load: For keys that `vembed.load` takes too: "reads" for how a model is read, "vectors" for what changes its
            vectors, so that an index must keep it.
    """
    facts: dict[str, Any] = {"affects": affects}
    if load is not None:
        facts["load"] = load
    if unit is not None:
        facts["unit"] = unit
    if acts_with is not None:
        facts["acts_with"] = {other: list(values) for other, values in acts_with.items()}
    # pydantic checks the choices by a regular expression, of whose special characters only "+" is escaped here.
    pattern = None
    if choices:
        facts |= {"choices": list(choices), "form": form or ", ".join(choices)}
        pattern = f"^({'|'.join(choices)})$".replace("+", r"\+")
    return Field(default, description=meaning, pattern=pattern, json_schema_extra=facts)


def word(metavar: str, meaning: str, default: Any = ...) -> Any:
    """Declare a positional word of a command; a list takes one or more."""
    return Field(default, description=meaning, json_schema_extra={"word": metavar})


def option(
    default: Any,
    meaning: str,
    *,
    metavar: str | None = None,
    spellings: Sequence[str] = (),
    one_of: str | None = None,
    bare: Any = None,
    one_word: bool = False,
) -> Any:
    """Declare an option of a command; a boolean is a flag, a Literal a choice, a list takes words and may be repeated.

    The capability behind it may have it as a keyword argument in Python too: the field's name is the argument's.

    Args:
        default: `...` for an option that must be given.
        spellings: The option's names, where they don't follow from the field's.
        one_of: Options with the same text here exclude each other; with "!" at its end one of them must be given.
        bare: Value of the option without a word behind it.
        one_word: Whether a list takes one word each time, so that a positional word may follow it.
    """
    facts = {"metavar": metavar, "one_of": one_of, "bare": bare, "one_word": one_word}
    return Field(
        default, description=meaning, json_schema_extra=facts | ({"spellings": list(spellings)} if spellings else {})
    )


def facts_of(info: FieldInfo) -> dict[str, Any]:
    """Return what the declaration of a field says beside type, default and meaning."""
    assert isinstance(info.json_schema_extra, dict)  # `key`, `word` and `option` make every field of a section
    return info.json_schema_extra


def idle_rules(
    fields: Mapping[str, FieldInfo],
    values_of: Callable[[Any, str], Sequence[object]],
    hint: Callable[[Any, str, str], str],
) -> Iterator[Rule]:
    """Yield a rule for each key that has an effect only with some values of another key (`acts_with`).

    A key at its default, false or null asks for nothing and is never refused; a key that is true by default gets no
    rule.

    Args:
        values_of: Config, other key -> the values that the other key has; `loss_type` has those of all sources.
        hint: Config, other key, idle key -> the end of the message, often empty.
    """
    for name, info in fields.items():
        if info.default is True:
            continue
        for other, allowed in facts_of(info).get("acts_with", {}).items():
            yield _idle_rule(name, info.get_default(), other, allowed, values_of, hint)


def _idle_rule(
    name: str,
    default: object,
    other: str,
    allowed: Sequence[object],
    values_of: Callable[[Any, str], Sequence[object]],
    hint: Callable[[Any, str, str], str],
) -> Rule:
    choices = one_of(map(written, allowed)) if allowed else ""  # empty: any value that isn't null

    def broken(config: Any) -> str | None:
        value, present = getattr(config, name), getattr(config, other)
        # `is False`, since 0 == False: a count of 0 is a wish, and is refused like any other.
        if value in (default, None) or value is False:
            return None
        if not allowed:
            return None if present is not None else f"{name} has no effect without {other}; remove it or set {other}"
        if any(_allows(choice, value) for value in values_of(config, other) for choice in allowed):
            return None
        return (
            f"{name} has no effect with {other} {written(present)}; remove it or set {other} to {choices}"
            f"{hint(config, other, name)}"
        )

    sentence = f"`{name}` has an effect only with `{f'{other}: {choices}' if allowed else other}`."
    # `loss_type` is one of three keys that name losses: a message may have to blame any of them.
    return Rule(sentence, (name, other, *(("added_losses", "data") if other == "loss_type" else ())), broken)


def _allows(choice: object, value: object) -> bool:
    if isinstance(choice, Mapping):  # {"minimum": 2}
        return isinstance(value, int) and value >= choice["minimum"]
    return value == choice


def written(value: object) -> str:
    """Return a scalar as a configuration file writes it: true, null, auto, 3."""
    if isinstance(value, Mapping):
        return f"{value['minimum']} or more"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
