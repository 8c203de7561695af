# make demo   train with every strategy on generated data
# make test   lint, types and tests; sets up .venv by itself
# make lint   ruff and mypy only
# make fuzz   damaged files and random settings, for ten minutes (SECONDS=…, FIRST=…)
# make faults kill, pause and cut off every role of every strategy; table in docs/reliability.md (cuts need root)
# make clean  remove everything that was built

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard csrc/*)

.PHONY: demo test lint fuzz faults build clean

build: $(STAMP)

# pip's own build isolation fetches scikit-build-core, nanobind and (where absent) cmake and ninja.
$(STAMP): pyproject.toml $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("gnnfleet needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@

demo: build
	$(BIN)/gnnfleet demo

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m tests

SECONDS ?= 600
FIRST   ?= 0
fuzz: build
	$(BIN)/python -m tests.fuzz $(SECONDS) $(FIRST)

faults: build
	$(BIN)/python -m tests.faults

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
