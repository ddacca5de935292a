# make help lists the targets. Everything runs in .venv, made on first use and reused after.

PYTHON ?= python3
# The torch build, as pip arguments: make TORCH="torch==2.11.0 --index-url https://..." train
TORCH ?=
ARCHS ?= 80 90 120

VENV := .venv
PY := $(VENV)/bin/python
QUICK := runs/quickstart
key = $(shell (cat $(1); echo '$(TORCH) $(PYTHON)') | cksum | cut -d' ' -f1)
RUN_STAMP := $(VENV)/.ready-run-$(call key,requirements.txt)
DEV_STAMP := $(VENV)/.ready-dev-$(call key,requirements.txt requirements-dev.txt)
export DS_BUILD_OPS := 0

.PHONY: help setup train lint fix test test-slow test-gpu kernels configs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | column -t -s'|'

$(RUN_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; fix: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip setuptools wheel
	$(if $(TORCH),$(PY) -m pip install -q $(TORCH))
	$(if $(TORCH),grep -v '^torch==' requirements.txt > $(VENV)/requirements.txt && $(PY) -m pip install -q -r $(VENV)/requirements.txt,$(PY) -m pip install -q -r requirements.txt)
	@rm -f $(VENV)/.ready-*; touch $@

$(DEV_STAMP): $(RUN_STAMP)
	grep -v '^-r ' requirements-dev.txt > $(VENV)/requirements-dev.txt
	$(PY) -m pip install -q -r $(VENV)/requirements-dev.txt
	@touch $@

setup: $(DEV_STAMP) ## make .venv with everything that tests and lint need

train: $(RUN_STAMP) ## the whole main job on real text: init, preload, fit, export, plot, generate
	@mkdir -p $(QUICK)
	$(PY) -m trainer.data.corpus $(QUICK)/text
	$(PY) init_model.py --n_layer 4 --n_embd 128 --vocab_size byte --seed 1 --skip-if-exists $(QUICK)/rwkv-init.pth
	$(PY) preload_datapath.py configs/quickstart.yaml
	$(PY) lightning_trainer.py fit -c configs/quickstart.yaml
	$(PY) export_checkpoint.py $(QUICK)/checkpoints rwkv-quickstart.pth
	$(PY) -m trainer.train.plot $(QUICK)/checkpoints rwkv-quickstart-loss.png
	$(PY) generate.py rwkv-quickstart.pth --prompt "def " --tokens 300 --temperature 0.7 --top-p 0.9 --seed 1

lint: $(DEV_STAMP) ## ruff, mypy, import layers, spelling
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy trainer
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/codespell
	@wc -l $$(git ls-files 'trainer/*.py') | awk '$$2 != "total" && $$1 > 500 {print "long file: " $$0}'

fix: $(DEV_STAMP) ## format and apply ruff's safe fixes
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

test: $(DEV_STAMP) ## fast CPU tests, at most 5 minutes on 2 cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: $(DEV_STAMP) ## kills, ZeRO on 2 processes, recall, notebooks: at most 20 minutes on 2 cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "slow and not gpu"

test-gpu: $(DEV_STAMP) ## parity on a CUDA device
	$(PY) -m pytest -q -m gpu

kernels: $(RUN_STAMP) ## build the CUDA kernels ahead of time, for ARCHS
	$(PY) -m trainer.ops.wkv7.build --arch $(ARCHS)

configs: $(DEV_STAMP) ## write the generated configs, pages and tables anew
	$(PY) -m trainer.config.examples
	$(PY) -m trainer.data.recipes
	$(PY) -m tests.reliability.matrix

clean: ## remove what runs and tests left; keeps .venv
	rm -rf runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
