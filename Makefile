# Two commands set everything up on a machine with Python 3.11+ and nothing else:
#   make demo    install, then train a 3M Chinese model and teach it to answer (about six minutes)
#   make test    install, then run the tests
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ifeq ($(OS),Windows_NT)
BIN = $(VENV)/Scripts
endif
DEMO ?= demo-run
MINUTES ?= 3

.PHONY: demo test lint bench oracles clean

demo: $(VENV)/.installed
	$(BIN)/gpt2llama demo --minutes $(MINUTES) --out $(DEMO)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# References that compile from source (ten minutes); their tests are skipped without them.
oracles: $(VENV)/.installed-dev
	$(BIN)/python -m pip install llama-cpp-python==0.3.36

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/training.py --out benchmarks/results/training.json

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
