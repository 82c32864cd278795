# `make demo` aligns the starter model and shows what changed, `make test` runs the fast tests and those of what changed,
# `make test-all` all tests (SELECT="--tier slow": the others), `make gates` trains every recipe for three epochs at full
# width and few blocks, an hour of one core, `make lint` checks style, types and prose, `make fuzz` reads hostile inputs
# for ten minutes, `make docs` builds the site into site/.
#
# They install the tested versions of constraints.txt. `make demo CONSTRAINTS=` takes the newest of the day, in an
# environment of its own. `make lock` renews constraints.txt; `make ends` tries the lowest and the newest versions;
# `make release URL=ADDRESS` builds dist/, checks it, and tries its wheel in environments outside of the clone, one for
# each of PYTHONS="python3.11 python3.13"; RELEASE=--tests runs the sdist's tests too. `make docs URL=ADDRESS` links the
# site to the repository and to notebooks in Colab.
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
# Without bytecode every process of a test compiles the package anew, and some images forbid it.
unexport PYTHONDONTWRITEBYTECODE
CONSTRAINTS ?= constraints.txt
VENV := $(if $(CONSTRAINTS),.venv,.venv-newest)
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable
# The extras whose packages constraints.txt pins: all but vllm, which pins a torch of its own.
LOCKED = test browser docs lint clip server ocr video mp4 text svg fid translation parquet datasets wandb trackio torchao bitsandbytes
# Without the pages of methods.
PROSE = README.md CONTRIBUTING.md $(shell find docs -name '*.md' -not -path 'docs/methods/*')

# Three workers for two cores: some tests wait.
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder
# Pages are opened in a Chromium where one is installed.
CHROMIUM := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))
# Jobs are run where Debian's Slurm is installed: its daemons are in /usr/sbin.
SLURM := $(and $(wildcard /usr/sbin/slurmctld),$(wildcard /usr/sbin/munged))
# Judges are asked where the packages of `transformers serve`, or of llama.cpp's server, are installed.
PACKAGES = $(VENV)/lib/python3*/site-packages
SERVERS = $(if $(and $(wildcard $(PACKAGES)/fastapi),$(wildcard $(PACKAGES)/openai)),tests/servers/test_judges.py) \
    $(if $(and $(wildcard $(PACKAGES)/llama_cpp),$(wildcard $(PACKAGES)/gguf)),tests/servers/test_llama_cpp.py)
# Request classes of SGLang's wheel, where it can be fetched: unpacked without the packages that it needs to serve.
export FLOWGRPO_SGLANG := $(VENV)/sglang

.PHONY: demo test test-all gates lint fuzz docs lock ends release
demo: $(VENV)/installed
	$(BIN)/python -m flowgrpo demo

test: $(VENV)/tested
	$(PYTEST) --tier fast

test-all: $(VENV)/tested-all
	-test -d $(FLOWGRPO_SGLANG) || $(BIN)/python -m pip install --quiet --no-deps --target $(FLOWGRPO_SGLANG) sglang==0.5.23
	$(PYTEST) $(SELECT) tests $(if $(CHROMIUM),tests/browser) $(if $(SLURM),tests/slurm) $(SERVERS) \
	    $$(test -d $(FLOWGRPO_SGLANG)/sglang && echo tests/sglang)
	@test -d $(FLOWGRPO_SGLANG)/sglang || echo "SGLang's wheel could not be fetched, so tests/sglang did not run"
	$(if $(CHROMIUM),,@echo "no Chromium was found, so tests/browser did not run (Debian: apt-get install chromium)")
	$(if $(SLURM),,@echo "no Slurm was found, so tests/slurm did not run (Debian: apt-get install slurm-wlm munge)")
	$(if $(word 2,$(SERVERS)),,@echo "of tests/servers ran: $(or $(strip $(SERVERS)),nothing) ($(BIN)/python -m pip install 'transformers[serving]' 'llama-cpp-python[server]' gguf)")

fuzz: $(VENV)/tested
	$(BIN)/python -m tests.fuzz.battery --seconds 600 --failures fuzz_failures.json

# `make gates GATES="sdxl_24gb sana"` trains these recipes.
gates: $(VENV)/tested
	$(BIN)/python scripts/measure/gates.py $(GATES)

docs: $(VENV)/documented
	NO_MKDOCS_2_WARNING=1 FLOWGRPO_URL=$(URL) $(BIN)/python -m mkdocs build --quiet
	$(BIN)/python scripts/docs/check_links.py site

lint: $(VENV)/linted
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python scripts/docs/check_prose.py
	$(BIN)/proselint check $(PROSE)

release:
	$(PYTHON) -m venv .venv-release && .venv-release/bin/python -m pip install --quiet build twine
	.venv-release/bin/python scripts/build/release.py --url $(or $(URL),$(error make release URL=https://.../flowgrpo)) \
	    --python $(PYTHONS) $(RELEASE)

lock:
	$(PYTHON) -m venv .venv-lock && .venv-lock/bin/python -m pip install --quiet uv
	.venv-lock/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --upgrade --no-annotate --quiet \
	    --custom-compile-command 'make lock' $(LOCKED:%=--extra %) --output-file constraints.txt

ends:
	scripts/fuzz/ends.sh lowest
	scripts/fuzz/ends.sh newest

# Without --system-site-packages and without torchaudio, whose build may not fit torch's.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/linted: $(VENV)/installed
	$(INSTALL) '.[lint]'
	touch $@

$(VENV)/documented: $(VENV)/installed
	$(INSTALL) '.[docs]'
	touch $@

$(VENV)/tested: $(VENV)/installed
	$(INSTALL) '.[test]'
	touch $@

$(VENV)/tested-all: $(VENV)/tested
	$(INSTALL) '.[test,browser,docs]'
	touch $@
