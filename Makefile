# Two commands: `make demo` aligns the starter model and shows what changed, `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test
demo: .venv/installed
	$(BIN)/python -m flowgrpo train configs/starter.yaml

test: .venv/tested
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Without --system-site-packages and without torchaudio, whose build may not fit torch's.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
