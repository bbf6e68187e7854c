# Everything a newcomer runs. Each target installs what it needs into .venv of this checkout, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NPROC  ?= 2
ARGS   ?=
export OMP_NUM_THREADS := 1

.PHONY: train test test-long check fix clean

# A stamp per set of extras: nothing is installed again until setup.py or the constraints change.
$(VENV)/.installed-%: setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

train: $(VENV)/.installed-train
	$(BIN)/python -m core.training.launch --nproc-per-node $(NPROC) examples/gpt/pretrain_gpt.py \
	    --use-torch-fsdp2 $(ARGS)

test: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m pytest -m 'not long and not gpu' $(ARGS)

# What is too slow for every commit: more ranks, compiled layers, whole runs.
test-long: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m pytest -m 'long and not gpu' $(ARGS)

check: $(VENV)/.installed-train,test,dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.installed-train,test,dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info runs
