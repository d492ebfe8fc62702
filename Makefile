# Set-up and the main jobs; every target works on a fresh checkout of macOS or Linux.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# mlx brings its Metal library on macOS; on Linux a back end is chosen by an extra.
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),,cpu)
comma := ,
EXTRAS := dev$(if $(BACKEND),$(comma)$(BACKEND))

.PHONY: demo test lint wheel format clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent tests/typed_use.py

# Builds sdist and wheel, and tries the wheel in an environment of its own.
wheel: $(VENV)/installed
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -I -m pip install --quiet "$$(echo dist/turbospark-*.whl)$(if $(BACKEND),[$(BACKEND)])"
	cd dist && ../$(VENV)-wheel/bin/python -I ../tests/wheel_smoke.py
	rm -rf $(VENV)-wheel

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-wheel .demo build dist *.egg-info
