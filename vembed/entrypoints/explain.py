"""`vembed explain [KEY]`: what a key of the configuration does, as docs/configuration.md says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.config.documents import write_mapping
from vembed.config.messages import key_schemas, nearest_key, show_value
from vembed.config.names import ALIASES, ANY_VALUE, FOREIGN, OTHER_KEYS, VALUES_ELSEWHERE, our_value, plain_name
from vembed.config.reference import example, key_facts
from vembed.config.schema import SECTIONS, rules, section_keys
from vembed.entrypoints.command import run_command
from vembed.entrypoints.options import Options, check, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.section import word
from vembed.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence


class ExplainOptions(Options):
    """Say what a key of the configuration does: its values, default, effect and rules. Without KEY, list all."""

    key: str | None = word("KEY", "key, alias, section, or what another trainer calls it or a value", None)


OPTIONS = ExplainOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Say what a key of the configuration does."""
    given = parse_words(ExplainOptions, arguments, program=program)
    return run_command(lambda: _run(check(ExplainOptions, given).key))


def _run(name: str | None) -> int:
    # A section, an alias, a key, then what other trainers have: a word that is several of these is the first.
    word = "" if name is None else plain_name(name)
    sections = [title for title in SECTIONS if name in (None, title) or title.lower() == word]
    if sections and word not in key_schemas():
        # The keys of each section with the first sentence of what they do.
        listings = []
        for title in sections:
            names = section_keys(title)
            width = max(map(len, names))
            summaries = [str(key_schemas()[key]["description"]).partition(". ")[0].rstrip(".") for key in names]
            lines = [f"  {key:<{width}}  {text}" for key, text in zip(names, summaries, strict=True)]
            listings.append("\n".join([title, *lines]))
        print("\n\n".join(listings))
        return ExitCode.OK
    assert name is not None
    if word in ALIASES or word in OTHER_KEYS:
        targets = ALIASES.get(word) or (OTHER_KEYS[word],)
        said = "is another name of" if word in ALIASES else "is what other trainers call"
        print(f"{word} {said} {' and '.join(targets)}\n")
        print("\n\n".join(map(_key, targets)))
    elif word in key_schemas():
        print(_key(word))
    elif elsewhere := [row for row in FOREIGN if row.key == word]:
        print(f"{word} is a key of other trainers")
        for row in elsewhere:
            print(f"  {'' if row.value is ANY_VALUE else f'{show_value(row.value)}: '}{row.verdict}: {row.text}")
    elif values := {key: ours for key in VALUES_ELSEWHERE if (ours := our_value(key, word)) is not None}:
        said = " and ".join(f"{key}: {ours}" for key, ours in values.items())
        print(f"{visible(name)} is what other trainers call {said}\n")
        print("\n\n".join(map(_key, values)))
    else:
        near = nearest_key(word)
        hint = "vembed explain lists every key" if near is None else f"did you mean {near}?"
        raise ConfigError(f"there is no key {visible(name)}; {hint}")
    return ExitCode.OK


def _key(name: str) -> str:
    """Return what the reference says of a key, the rules that it takes part in, and how it is written."""
    facts = [(label, text) for label, text in key_facts(name).items() if text]
    facts += [("Rule", rule.sentence) for rule in rules() if name in rule.keys]
    value = example(name)
    written = (
        show_value(value) if isinstance(value, (dict, list)) else write_mapping({"": value}).partition(":")[2].strip()
    )
    facts += [("In the file", f"{name}: {written}"), ("As an override", f"{name}={written}")]
    width = max(len(label) for label, _ in facts)
    return "\n".join([name, *(f"  {label:<{width}}  {text.replace('`', '')}" for label, text in facts)])
