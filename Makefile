# Set-up and the main jobs; every target works on a fresh checkout of macOS or Linux.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# mlx brings its Metal library on macOS; on Linux a back end is chosen by an extra.
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),,cpu)
comma := ,
EXTRAS := dev$(if $(BACKEND),$(comma)$(BACKEND))

.PHONY: demo test lint format clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .demo build dist *.egg-info
