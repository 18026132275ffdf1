# One command list; the automation only calls it. PYTHON chooses the interpreter of `make setup`.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STRICT := epochless_vllm/protocol epochless_vllm/store epochless_vllm/publication epochless_vllm/patch \
          epochless_vllm/wire.py epochless_vllm/verify epochless_vllm/reference epochless_vllm/client epochless_vllm/cli

.PHONY: setup demo test test-engine fuzz lint bench crash mutation soak

setup:
	@PYTHON=$(PYTHON) VENV=$(VENV) bash docker/setup.sh

demo: setup
	@$(PY) -m epochless_vllm.cli.main demo $(if $(TP),--tensor-parallel-size $(TP))

test: setup
	@$(PY) -m pytest -m "not engine and not gpu"

test-engine: setup
	@$(PY) -m tests.engine_modules

# Coverage-guided, for as long as you like: make fuzz FOR=600
fuzz: setup
	@$(PY) -m tests.fuzz --seconds $(or $(FOR),60)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m mypy $(STRICT)

bench: setup
	@$(PY) benchmarks/bench_publish.py

# The whole crash campaign; WRITE=1 renews tests/crash/README.md from it.
crash: setup
	@$(PY) -m tests.crash.campaign --servers $(if $(WRITE),--write)

# One edit of the sources at a time, and which tests notice; one fault in a receipt, a ledger or a patch, and which
# checkers refuse it. WRITE=1 renews tests/mutation/README.md from it.
mutation: setup
	@$(PY) -m tests.mutation $(if $(WRITE),--write)

soak: setup
	@$(PY) benchmarks/soak.py --seconds $(or $(SECONDS),60)
