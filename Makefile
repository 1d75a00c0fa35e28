# The verbs of the repository. They run in the environment that is active.
.PHONY: install install-dev format lint types contract test test-all fuzz check docs site train train-tensorboard quickstart \
	gpu-info doctor memory-check setup-accelerate

install:
	python -m pip install -c constraints.txt -e ".[test]"

install-dev:
	python -m pip install -c constraints.txt -e ".[dev]"

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .

types:
	mypy

contract:
	lint-imports

test:
	pytest

test-all:
	pytest -m ""

# Ten thousand examples of hostile configurations, rows, pictures and checkpoints; FUZZ_SEED=7 repeats those of a seed.
FUZZ_SEED ?= $(shell date +%s)

fuzz:
	@echo "FUZZ_SEED=$(FUZZ_SEED)"
	VEMBED_FUZZ_EXAMPLES=10000 VEMBED_FUZZ_SEED=$(FUZZ_SEED) pytest -m "" tests/fuzz

check: lint types contract test

docs:
	python -m vembed.config.reference docs
	python -m vembed.entrypoints.commands_page > docs/reference/commands.md
	python -m vembed.config.reference keys > docs/.keys.py && mv docs/.keys.py vembed/api/keys.py
	python -m vembed.training.models_page

# The documents as a site: open site/index.html, or `mkdocs serve` for the search as well.
site:
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

quickstart:
	python run.py configs/quickstart.yaml --resume never --config_override overwrite_output_dir=true

# Every verb below takes CONFIG=my.yaml; what stands here is a small built-in run.
CONFIG ?= configs/quickstart.yaml
# Where TensorBoard looks for runs.
LOGDIR ?= runs

train:
	python run.py $(CONFIG)

# TensorBoard at http://localhost:6006 for as long as the training lasts.
train-tensorboard:
	@tensorboard --logdir $(LOGDIR) --port 6006 & board=$$!; trap "kill $$board 2>/dev/null" EXIT INT TERM; \
	python run.py $(CONFIG) --config_override report_to=tensorboard

# Devices, versions and variables, without starting anything.
gpu-info:
	python -m vembed doctor --no-self-test

# The same with a test of processes that work together, and what CONFIG would plan here.
doctor:
	python -m vembed doctor $(CONFIG)

# Memory of every strategy, here or on other devices: make memory-check CONFIG=my.yaml DEVICES=4x24GB
memory-check:
	python -m vembed plan $(CONFIG) $(if $(DEVICES),--devices $(DEVICES))

# Answer a few questions once; accelerate launch then starts runs over several machines.
setup-accelerate:
	accelerate config
