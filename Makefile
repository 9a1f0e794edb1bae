# flashdraft: every target is one call of a module; `make help` lists them.
MODEL ?= smollm2-135m
CORPUS ?= demo
STAGE ?= sft
FORMAT ?= zlab
NPROC ?= auto
ARGS ?=
PORT ?= 5000
JOB ?= features
ON ?= local
PYTHON ?= python3
PY := .venv/bin/python
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo features train rl-study eval compare export ui test bench bench-gpu parity serve-check elastic-check submit cluster-test doctor lint clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("flashdraft: Python %d.%d is too old; install 3.11 or newer, or set PYTHON=" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv && $(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

install: .venv/installed ## create .venv and install everything into it (the other targets do it themselves)

demo: install ## the whole path on a laptop: corpus, features, training, τ before and after, MLflow (about 10 minutes)
	@$(PY) -m infra demo $(ARGS)

features: install ## MODEL= CORPUS=: responses by the target, then its hidden states into the store
	@$(PY) -m pipeline --model "$(MODEL)" --corpus "$(CORPUS)" $(ARGS)

train: install ## STAGE=sft|rl|rl-onpolicy MODEL= [RECIPE= NPROC= INIT=]: train a drafter from the store; rl goes on from INIT=runs/...
	@$(PY) -m trainer --stage "$(STAGE)" --model "$(MODEL)" --nproc "$(NPROC)" $(if $(RECIPE),--recipe "$(RECIPE)") $(if $(INIT),--init "$(INIT)") $(ARGS)

rl-study: install ## [ARGS=]: second stages compared at equal steps on a small target, with intervals (docs/rl.md)
	@$(PY) -m trainer.study $(ARGS)

eval: install ## MODEL= [DRAFTER= SUITES= LIMIT=]: τ, speed-up and the lossless check on the suites
	@$(PY) -m eval --model "$(MODEL)" $(if $(DRAFTER),--drafter "$(DRAFTER)") $(if $(SUITES),--suites-from "$(SUITES)") $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

compare: install ## A= B=: which of two evaluated drafters is better, by how much, how sure
	@$(PY) -m eval compare "$(A)" "$(B)" $(ARGS)

export: install ## RUN= FORMAT=zlab|speculators: a drafter in the layout that SGLang and vLLM load, with a card
	@$(PY) -m trainer export "$(RUN)" --format "$(FORMAT)" $(ARGS)

submit: install ## JOB=features|train|eval ON=ray|kuberay|slurm|local MODEL= [PROFILE=]: the same stage on a cluster; ARGS=--dry-run shows it
	@$(PY) -m infra submit "$(JOB)" --on "$(ON)" "MODEL=$(MODEL)" $(if $(PROFILE),--profile "$(PROFILE)") $(if $(DRAFTER),"DRAFTER=$(DRAFTER)") $(ARGS)

cluster-test: install ## clusters on this machine (root, Linux): kill workers, drivers, hosts and links; nothing may be lost
	@$(PY) -m pytest -x -s -p no:xdist --timeout 1200 tests/cluster/check_*.py $(ARGS)

ui: install ## [PORT=]: the MLflow pages on http://127.0.0.1:5000
	@$(PY) -m infra ui --port $(PORT)

test: install ## the complete test suite, on a CPU
	@$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: install ## PART=features|pipeline|train-step|trainer|kernels|replay: ratios against named opponents into runs/bench/
	@$(PY) -m infra bench "$(PART)" $(ARGS)

parity: install ## the drafter and losses against dflash, speculators and SpecForge from PyPI, in environments of their own
	@$(PY) -m trainer.drafter.peers && $(PY) -m pytest tests/parity $(ARGS)

serve-check: install ## [RUN=]: vLLM on the CPU and the authors' loop run the exported drafter; tokens and acceptance against ours (3.4 GB, once)
	@$(PY) -m eval.serve_check $(if $(RUN),--run "$(RUN)") --model "$(MODEL)" $(ARGS)

elastic-check: install ## every ZeRO stage on 1, 2 and 4 ranks resumed by each, and a run killed five times
	@FLASHDRAFT_ELASTIC=1 $(PY) -m pytest tests/trainer/test_elastic_check.py $(ARGS)

bench-gpu: ## step time, MFU, memory and kernels on one GPU (torch, triton, transformers and numpy are enough)
	@$(or $(wildcard $(PY)),$(PYTHON)) -m trainer.drafter.bench_gpu $(ARGS)

doctor: install ## check this machine and say what is wrong in plain words
	@$(PY) -m infra doctor

lint: install ## ruff
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

clean: ## remove .venv and caches; runs/, data/ and store/ stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
