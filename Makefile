# `make demo` aligns the starter model and shows what changed, `make test` runs the tests, `make lint` checks style, types
# and prose, `make fuzz` reads hostile inputs for ten minutes, `make docs` builds the site into site/.
PYTHON ?= python3
BIN := .venv/bin
# Without the titles of papers and the pages of methods.
PROSE = README.md CONTRIBUTING.md $(shell find docs -name '*.md' -not -name mechanisms.md -not -path 'docs/methods/*')

.PHONY: demo test lint fuzz docs
demo: .venv/installed
	$(BIN)/python -m flowgrpo train configs/starter.yaml

test: .venv/tested
	$(BIN)/python -m pytest -n 2 --dist worksteal

fuzz: .venv/tested
	$(BIN)/python -m tests.fuzz.battery --seconds 600 --failures fuzz_failures.json

docs: .venv/documented
	$(BIN)/python -m mkdocs build --quiet

lint: .venv/linted
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python scripts/check_prose.py
	$(BIN)/proselint check $(PROSE)

# Without --system-site-packages and without torchaudio, whose build may not fit torch's.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/linted: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	touch $@

.venv/documented: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

.venv/tested: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
