# `make help` lists what there is. Everything runs in .venv, which `setup` makes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := proxy metrics tests bench examples
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Of the tests: they wait more than they work.
WORKERS ?= $(shell expr 2 \* $(CORES))

# Compiled once, not in each of the many processes of the tests, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

.PHONY: help setup demo demo-budgets demo-backpressure demo-pipeline demo-tier demo-usage test test-fast coverage check docs format bench chaos broker wheels lock clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install everything into .venv, as the lock file says

# Without dependencies: the lock names them all, and a newer version of an extra must not disturb.
$(STAMP): requirements.lock pyproject.toml proxy/relay/_lane.c
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: setup  ## See a PySpark query held to its quota (about 2 minutes)
	$(BIN)/quota-proxy demo

demo-budgets: setup  ## See queries and a backfill share a link for a day (about 3 minutes)
	$(BIN)/quota-proxy demo budgets

demo-backpressure: setup  ## See batches follow the rate of their processing (about 3 minutes)
	$(BIN)/quota-proxy demo backpressure

demo-pipeline: setup  ## See a slow job hold back the one that feeds it (about 4 minutes)
	$(BIN)/quota-proxy demo pipeline

demo-tier: setup  ## See three members share clients, and one of them killed (about 2 minutes)
	$(BIN)/quota-proxy demo tier

demo-usage: setup  ## See who used what: four teams, and the report on them (about 3 minutes)
	$(BIN)/quota-proxy demo usage

test: setup  ## Run all tests, against a real broker and a real Spark
	tests/install-tools
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest \
		-n $(WORKERS) --max-worker-restart 1 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup  ## Run the tests that need nothing but Python and few seconds each (a minute)
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal -m "not slow" \
		tests/unit tests/wire tests/relay $(ARGS)

coverage: setup  ## Run all tests, and show which lines they do not reach
	$(MAKE) test ARGS="--cov=proxy --cov=metrics --cov-report=term:skip-covered $(ARGS)"

check: setup  ## Lint, types, import contracts, names, line budgets
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_names.py tests/unit/test_line_budgets.py

docs: setup  ## Write the tables of docs that are made of the code
	$(BIN)/python tests/unit/test_contributing.py

format: setup  ## Format the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: setup  ## Measure against HAProxy and the bounds (about an hour)
	$(BIN)/python -m bench $(ARGS)

chaos: setup  ## See clients keep to their bounds while members are killed and added (20 minutes)
	$(BIN)/python -m bench chaos $(ARGS)

broker: setup  ## Run the embedded Kafka broker on port 9092
	$(BIN)/quota-proxy broker --port 9092 --data build/broker

# Zig is a C compiler for any machine, and links with the symbols of an old glibc.
wheels: setup  ## Build wheels with the lane for Linux, x86-64 and arm64, into dist/
	$(BIN)/python -m venv build/wheels
	build/wheels/bin/pip install --quiet --disable-pip-version-check ziglang==0.13.0 setuptools==84.2.1
	for arch in x86_64 aarch64; do \
		zig="$(CURDIR)/build/wheels/bin/python -m ziglang cc -target $$arch-linux-gnu.2.17"; \
		rm -rf build/temp.* build/lib.*; \
		CC="$$zig" LDSHARED="$$zig -shared" _PYTHON_HOST_PLATFORM=linux-$$arch \
			build/wheels/bin/pip wheel --quiet --disable-pip-version-check --no-deps \
			--no-build-isolation --config-settings=--build-option=--plat-name=manylinux2014_$$arch \
			--wheel-dir dist . || exit 1; \
	done

lock: setup  ## Pin the newest versions that pyproject.toml allows
	$(BIN)/pip-compile --quiet --upgrade --extra dev --extra demo --generate-hashes --allow-unsafe \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --strip-extras \
		--output-file requirements.lock pyproject.toml

clean:  ## Remove what was built; the jar cache stays
	rm -rf .venv build dist .coverage proxy/relay/*.so
