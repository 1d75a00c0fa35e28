"""Train from a configuration file: `python run.py configs/quickstart.yaml`."""

import sys

from vembed.entrypoints.train import main

if __name__ == "__main__":
    sys.exit(main(program="python run.py"))
