# The two commands to start with: `make demo` and `make test`. Everything happens inside .venv.
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help install install-dev demo test test-slow test-gpu test-web test-schema lint bench clean

help:
	@echo "make demo       install if needed, then stream an answer from the nano model"
	@echo "make test       install if needed, then lint, type-check and test (CPU, twenty minutes)"
	@echo "make install    create $(VENV) and install deepinfer into it"
	@echo "make lint       ruff and mypy only"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-web   the tests of the web page in Chromium, if it is installed"
	@echo "make test-schema  schemathesis over the server's OpenAPI schema: no 5xx (some minutes)"
	@echo "make bench      measure throughput on this machine and print the results table"
	@echo "make clean      remove $(VENV) and the caches"

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@python="$$(scripts/find_python.sh)" && echo "creating $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml scripts/install_torch.py | $(BIN)/python
	@$(BIN)/python scripts/install_torch.py
	@echo "installing deepinfer"
	@$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools"
	@$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

demo: install
	@$(BIN)/deepinfer chat --model nano --stats --temperature 0 --max-tokens 200 --quick "Write two sentences about a dog who loves rain."

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: install-dev
	$(BIN)/python -m pytest -m "slow and not gpu"

test-gpu: install-dev
	$(BIN)/python -m pytest -m gpu

test-web: install-dev
	@$(BIN)/python -m pip install --quiet -e '.[web]'
	$(BIN)/python -m pytest -m web

test-schema: install-dev
	@$(BIN)/python -m pip install --quiet -e '.[schema]'
	SCHEMA_EXAMPLES=100 $(BIN)/python -m pytest -m slow tests/server/test_schema.py

bench: install-dev
	$(BIN)/deepinfer bench throughput
	$(BIN)/deepinfer bench report

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
