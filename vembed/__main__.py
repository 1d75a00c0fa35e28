"""`vembed COMMAND`: the same commands as `python -m vembed COMMAND`."""

import importlib
import sys

COMMANDS = {
    "train": "train a model from a configuration file",
    "plan": "print what a run would do, and stop",
    "evaluate": "evaluate models on retrieval sets",
    "encode": "encode a corpus into an index",
    "search": "search an index, in the terminal or on a local page",
    "doctor": "look at the machine, test it, and say what to mend",
    "export": "write a model with its card, for the library that loads it",
}
"""Command -> what it does. Each is a module of vembed.entrypoints, imported only when it is asked for."""


def main() -> int:
    """Run the command that the first word names and return its exit code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        listing = "\n".join(f"  {name:<10} {meaning}" for name, meaning in COMMANDS.items())
        print(f"usage: vembed COMMAND ...\n\n{listing}\n\nvembed COMMAND --help tells more.")  # noqa: T201
        return 0 if words else 2
    if words[0] not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.0)[0]
        print(f"error: no command {words[0]!r}; did you mean {close}?", file=sys.stderr)  # noqa: T201
        return 2
    module = importlib.import_module(f"vembed.entrypoints.{words[0]}")
    result: int = module.main(words[1:], program=f"vembed {words[0]}")
    return result


if __name__ == "__main__":
    sys.exit(main())
