# Every target does its own set-up: a virtual environment with pinned packages, and data.
# `make demo PYTHON=python3.12` chooses the Python; any from 3.11 on will do.

SHELL := /bin/bash
SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
RELEASE := import sys; v = sys.version_info; print(312 if v >= (3, 12) else 311 if v >= (3, 11) else '')
LOCK := requirements/py$(if $(PYTHON),$(shell $(PYTHON) -c "$(RELEASE)")).txt
RUN := $(VENV)/bin/python
ZOO := .venv/zoo
CACHE := .cache/meshdsl
DATA := $(CACHE)/held_out.npy $(CACHE)/flights.npz $(CACHE)/movies.npz
TYPES := .cache/types/meshdsl
FLAGS ?= -q -n 2 --dist loadfile
SELECT ?= -m 'not sweep'
export PYTHONPATH := .
export PYTHONDONTWRITEBYTECODE :=  # each of the processes that tests start would compile all modules again
# eight virtual devices, with threads enough that XLA's kernels and collectives do not wait for each other's (docs/evidence/fuzz.md)
EIGHT := JAX_NUM_CPU_DEVICES=8 NPROC=32

.PHONY: help demo test test-all lint docs bench calls coverage coverage-sums zoo inspections fuzz fuzz-bytes fuzz-sums fuzz-files chaos pipelines ray slurm strategies predictions targets overlap measured gpu bench-planner data dist clean

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

demo: $(VENV)/ready $(CACHE)/held_out.npy  ## plan, check, verify and train a GPT on 8 virtual CPU devices
	$(RUN) -m meshdsl.training.demo examples/gpt.py --mesh data=4,model=2

test: $(VENV)/ready $(DATA)  ## run the tests, but for long sweeps
	$(RUN) -m pytest $(FLAGS) $(SELECT)

test-all:  ## run all tests, sweeps too, on every suitable Python that is installed
	@for p in python3.11 python3.12 python3.13; do \
	  if $$p -c '$(SUITABLE)' 2>/dev/null; then $(MAKE) test SELECT= PYTHON=$$p VENV=.venv/$$p || exit 1; else echo "no $$p here"; fi; \
	done

lint: $(VENV)/ready  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES) && ln -sfn $(CURDIR)/meshdsl/* $(CURDIR)/{layouts,lowering,models} $(TYPES)/
	MYPYPATH=$(dir $(TYPES)) $(RUN) -m mypy -p meshdsl

docs: .venv/docs/ready  ## build the documentation site into docs/_build; warnings are errors
	.venv/docs/bin/sphinx-build -W --keep-going -q -b html docs docs/_build

bench: $(VENV)/ready $(DATA)  ## measure the figures of docs/evidence/benchmarks.md, and train the examples
	$(RUN) -m bench.planning
	$(RUN) -m bench.models
	$(RUN) -m bench.single
	$(RUN) -m bench.step
	$(RUN) -m bench.pipeline
	$(RUN) -m bench.memory
	$(RUN) -m bench.loop --steps 300 --rounds 3
	$(RUN) -m bench.examples

coverage: $(VENV)/ready  ## run JAX's own cases of every primitive, and write docs/evidence/coverage.md; CASES='--primitive sort --limit 5'
	$(EIGHT) $(RUN) -m tests.coverage $(CASES)

coverage-sums: $(VENV)/ready  ## check the same cases as jax.jit, explicit axes and shard_map divide them, on simulated devices; one in EVERY=9, PRIMITIVE=sort
	$(EIGHT) $(RUN) -m tests.coverage.sums --every $(or $(EVERY),9) $(if $(PRIMITIVE),--primitive '$(PRIMITIVE)')

zoo: $(ZOO)/ready  ## plan, check and time the models of other libraries; public training programs with CHECKOUTS=folder
	$(ZOO)/bin/python -m bench.zoo.run
	$(ZOO)/bin/python -m bench.zoo.gaps
	$(ZOO)/bin/python -m bench.zoo.sums
	$(EIGHT) $(ZOO)/bin/python -m bench.programs $(if $(CHECKOUTS),--checkouts $(CHECKOUTS))

inspections: $(ZOO)/ready  ## inspect public training programs with CHECKOUTS=folder, and write docs/evidence/inspections.md
	$(EIGHT) $(ZOO)/bin/python -m bench.inspections $(if $(CHECKOUTS),--checkouts $(CHECKOUTS))

fuzz: $(VENV)/ready pipelines  ## judge random programs, 10,000 if not told otherwise; FUZZ=1000 SEED=7
	$(EIGHT) $(RUN) -m tests.fuzz --cases $(or $(FUZZ),10000) $(if $(SEED),--seed $(SEED))

fuzz-bytes: $(VENV)/ready  ## bytes of random slices, pads, updates, ... beside the least possible; FUZZ=1000 SEED=7
	$(EIGHT) $(RUN) -m tests.fuzz.form_bytes --cases $(or $(FUZZ),300) --seed $(or $(SEED),0)

fuzz-sums: $(VENV)/ready  ## check random programs of XLA's partitioner, and faulty variants, on simulated devices; FUZZ=100 MUTANTS=0 SEED=7
	$(EIGHT) $(RUN) -m tests.fuzz.compiled --cases $(or $(FUZZ),1000) --seed $(or $(SEED),0) $(if $(MUTANTS),--mutants $(MUTANTS))

chaos: $(VENV)/ready  ## kill, stop and hang supervised runs at random, 100 faults if not told otherwise; FAULTS=20 SEED=7
	$(RUN) -m tests.chaos --faults $(or $(FAULTS),100) --seed $(or $(SEED),0)

fuzz-files: $(VENV)/ready  ## read mutated plan, topology and schedule files, 2,000 if not told otherwise; FUZZ=300 SEED=7
	$(RUN) -m tests.fuzz.files --cases $(or $(FUZZ),2000) --seed $(or $(SEED),0)

pipelines: $(VENV)/ready  ## run pipelines of every schedule on up to 8 devices, all 1,600 cases if not told otherwise; LIMIT=200 SEED=7
	$(EIGHT) $(RUN) -m tests.pipelining.sweep $(if $(LIMIT),--limit $(LIMIT)) $(if $(SEED),--seed $(SEED)) $(if $(SKIP),--skip $(SKIP))

slurm: $(VENV)/ready  ## train under a SLURM of one node, which has to be installed
	MESHDSL_SLURM=1 $(RUN) -m pytest -q tests/training/joining/test_launchers.py

ray: .venv/ray/ready  ## run the tests of the examples for Ray
	.venv/ray/bin/python -m pytest $(FLAGS) tests/training/joining/test_ray.py

strategies: $(VENV)/ready  ## write docs/evidence/strategies.md, and run every strategy of every model at tiny sizes; FAMILY='gpt llama'
	$(RUN) -m bench.strategies
	$(EIGHT) $(RUN) -m tests.models $(FAMILY)

predictions: $(VENV)/ready  ## compare predicted with published step times, and write docs/evidence/predictions.md; about an hour
	$(RUN) -m bench.published --cache .cache/predictions.jsonl

targets: .venv/targets/ready  ## compile the gallery and models for TPUs and GPUs that are not there, and write docs/evidence/targets.md; PARTS='gallery'
	.venv/targets/bin/python -m bench.targets $(PARTS)

overlap: .venv/targets/ready  ## compile small programs and models for absent TPUs and GPUs, and write docs/evidence/overlap.md; PARTS='kinds'
	.venv/targets/bin/python -m bench.overlap $(PARTS)

measured: $(ZOO)/ready  ## compare predicted with measured step times of this machine, which should be idle, and write docs/evidence/measured.md
	$(ZOO)/bin/python -m bench.measured --again

gpu: $(VENV)/ready  ## train models on the GPU at hand, planned and under jax.jit, and write docs/evidence/gpu.md; MODELS='gpt2-124m'
	$(RUN) -m bench.gpu $(MODELS)

calls: $(VENV)/ready  ## compare the Python time of a call with that of jax.jit
	$(EIGHT) $(RUN) -m bench.calls

bench-planner: $(VENV)/ready  ## write docs/evidence/planner.md: gaps, a second solver, peers, planning time, overlap; PARTS='gaps peers'
	$(RUN) -m bench.planner.run $(PARTS)

data: $(DATA)  ## fetch text, flights and ratings

dist: .venv/release/ready  ## build sdist and wheel, check their metadata, and try the wheel outside the checkout
	rm -rf dist && .venv/release/bin/python -m build
	.venv/release/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear .venv/wheel && cd dist && env -u PYTHONPATH ../.venv/wheel/bin/python -m pip install --quiet *.whl
	cd dist && env -u PYTHONPATH ../.venv/wheel/bin/meshdsl --version
	tar xzOf dist/*.tar.gz --wildcards '*/examples/mlp.py' > dist/mlp.py
	cd dist && env -u PYTHONPATH ../.venv/wheel/bin/meshdsl plan mlp.py --mesh data=4,model=2

clean:  ## remove what the targets made
	rm -rf $(VENV) .cache runs build dist docs/_build docs/jupyter_execute docs/reference/api *.egg-info

$(CACHE)/held_out.npy: | $(VENV)/ready
	$(RUN) -m meshdsl.training.datasets.text --cache $(CACHE)

$(CACHE)/flights.npz: | $(VENV)/ready
	$(RUN) -m meshdsl.training.datasets.flights --cache $(CACHE)

$(CACHE)/movies.npz: | $(VENV)/ready
	$(RUN) -m meshdsl.training.datasets.movies --cache $(CACHE)

$(VENV)/ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -r $(LOCK)
	$(RUN) -m pip install --quiet --no-deps -e .
	@touch $@

requirements/py.txt:  # no version was read
	@echo "meshdsl needs Python 3.11 or newer and '$(PYTHON)' is none; name one: make test PYTHON=/path/to/python"; exit 1

.venv/targets/ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv .venv/targets
	.venv/targets/bin/python -m pip install --quiet -r $(LOCK)
	.venv/targets/bin/python -m pip install --quiet -e '.[tpu,cuda]'
	@touch $@

.venv/ray/ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv .venv/ray
	.venv/ray/bin/python -m pip install --quiet -r $(LOCK)
	.venv/ray/bin/python -m pip install --quiet 'ray[train]>=2.50,<3' -e '.[train]'
	@touch $@

.venv/docs/ready: requirements/docs.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip install --quiet -r $<
	@touch $@

.venv/release/ready: pyproject.toml
	$(PYTHON) -m venv .venv/release
	.venv/release/bin/python -m pip install --quiet 'build>=1.2,<2' 'twine>=6,<8'
	@touch $@

$(ZOO)/ready: bench/zoo/requirements.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@
