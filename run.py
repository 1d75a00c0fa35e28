"""Train from a configuration file: `python run.py configs/quickstart.yaml`."""

import sys

if __name__ == "__main__":
    try:
        from vembed.entrypoints.train import main

        code = main(program="python run.py")
    except KeyboardInterrupt:  # while modules are imported: the command itself looks after signals
        print("interrupted", file=sys.stderr)  # noqa: T201
        code = 130
    sys.exit(code)
