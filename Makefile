# Every target makes what it needs first and re-uses what is there. `make PYTHON=python3.12 demo` picks another Python.
PYTHON ?= python3
ENGINE ?= auto
DEMO ?=
TESTS ?= tests/unit tests/engine
# Engine tests take 2-4 GiB each, so at most two at a time.
JOBS ?= 2
RUN := .venv/bin/python

.PHONY: help demo test env dev model lint types tables kernels unit bench-cpu wheel clean

help:
	@echo 'make demo       serve SmolLM2-135M with ZIPFUSION and show what it saves (makes its environment first)'
	@echo 'make test       lint, types, rendered tables and all tests that need no GPU (makes its environment first)'
	@echo 'make kernels    only the Triton and Gluon kernels, interpreted and compiled on the CPU'
	@echo 'make unit       only the tests without vLLM engines'
	@echo 'make bench-cpu  decode throughput against stock vLLM on this machine'
	@echo 'make tables     render the tables of README.md from benchmarks/results and the package'
	@echo 'make clean      remove environments and caches'

demo: env model
	@$(RUN) -m benchmarks.demo $(DEMO)

test: dev model
	@$(MAKE) --no-print-directory lint types
	$(RUN) -m benchmarks.render --check
	@$(MAKE) --no-print-directory kernels
	$(RUN) -m pytest -n $(JOBS) --dist loadfile $(TESTS)

env:
	@$(PYTHON) scripts/make_env.py --engine $(ENGINE)

dev:
	@$(PYTHON) scripts/make_env.py --engine cpu --dev

model: .venv/bin/python
	@$(RUN) scripts/prepare_model.py

.venv/bin/python:
	@$(PYTHON) scripts/make_env.py --engine cpu

lint: dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: dev
	$(RUN) scripts/check_types.py

# Triton would switch vLLM's CPU build to another model runner, so its kernels are compiled and interpreted in an environment of their own.
kernels: .venv-kernels/.stamp
	.venv-kernels/bin/python -m pytest -q tests/kernels

.venv-kernels/.stamp: tests/kernels/requirements.txt setup.cfg
	$(PYTHON) -m venv .venv-kernels
	.venv-kernels/bin/pip install -q -r tests/kernels/requirements.txt
	.venv-kernels/bin/pip install -q --no-deps -e .
	@touch $@

unit: dev
	$(RUN) -m pytest -n $(JOBS) tests/unit

bench-cpu: env model
	$(RUN) -m benchmarks.serve_cpu

tables: dev
	$(RUN) -m benchmarks.render

wheel: dev
	$(RUN) -m pip wheel -q --no-deps --no-build-isolation -w dist .

clean:
	rm -rf .venv .venv-gpu .venv-kernels .cache build dist
