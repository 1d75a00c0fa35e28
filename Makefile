# The verbs of the repository. They run in the environment that is active.
.PHONY: install install-dev format lint types contract test test-all check docs train quickstart

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

check: lint types contract test

docs:
	python -m vembed.config.reference > docs/configuration.md

quickstart:
	python run.py configs/quickstart.yaml --resume never --config_override overwrite_output_dir=true

# make train CONFIG=my.yaml
train:
	python run.py $(CONFIG)
