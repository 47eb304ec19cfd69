# Two commands do everything: `make demo` and `make test`. Both set .venv up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

CHAOS_SECONDS ?= 600

.PHONY: demo docs test test-all lint bench bench-processes tutorials chaos clean help

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

demo: $(READY)   ## sixteen nodes learn handwritten digits; ends by naming the report page
	$(BIN)/gossamer demo

# What asserts a rate or a duration runs by itself; everything else shares the cores.
test: lint       ## linters, types, import contracts, tests
	$(BIN)/pytest -m "not slow and not timing" --numprocesses auto
	$(BIN)/pytest -m "timing and not slow"

test-all: lint   ## the slow tests too
	$(BIN)/pytest -m "not timing" --numprocesses auto
	$(BIN)/pytest -m timing

lint: $(READY)   ## ruff, mypy, import-linter
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## benchmarks, as ratios within one run
	$(BIN)/python benchmarks/run.py

bench-processes: $(READY)  ## the engine processes: start-up, speed, memory, traffic
	$(BIN)/python benchmarks/processes.py

docs: $(READY)  ## the documentation site, in build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

tutorials: $(READY)  ## run the notebooks of docs/tutorials and write their outputs
	$(BIN)/python tests/test_tutorials.py

chaos: $(READY)  ## seeded faults, half the time simulated and half among real processes (CHAOS_SECONDS=600; as root it does more)
	PYTHONPATH=tests $(BIN)/python -m chaos --seconds $(CHAOS_SECONDS)

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Of pip's output: the large downloads, and the number of packages. Errors and warnings are shown as they are.
TERSE := while read -r verb what rest; do case "$$verb $$rest" in \
	"Downloading ("*[MG]B\)) echo "    $${what%%-[cp][py][0-9]*} $$rest";; \
	"Installing packages:"*) set -- $$rest; echo "    installing $$(($$\# - 1)) packages";; esac; done

# pip before 25.1 can't read dependency groups, so the environment's pip is brought up first. The torch pin is asked for by
# itself: a range would fetch a build with CUDA where a CPU build is at hand.
$(READY): SHELL := /bin/bash -o pipefail
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), which takes some minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1/3 pip"
	@$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@echo "2/3 torch"
	@$(BIN)/pip install $$(grep '^torch==' constraints.txt) --constraint constraints.txt | $(TERSE)
	@echo "3/3 gossamer and its tools"
	@$(BIN)/pip install --group dev --editable ".[all,ray,parsl,mlflow,wandb]" --constraint constraints.txt | $(TERSE)
	@touch $@
