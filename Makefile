# Everything a newcomer runs. Each target installs what it needs into .venv of this checkout, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NPROC  ?= 2
ARGS   ?=
# What wraps the model in `make train`; empty means replicas (DDP).
WRAPPER ?= --use-torch-fsdp2
export OMP_NUM_THREADS := 1

.PHONY: train test test-long test-gpu drill fuzz-files mutation check fix clean

# A stamp per set of extras: nothing is installed again until setup.py or the constraints change.
$(VENV)/.installed-%: setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

train: $(VENV)/.installed-train
	$(BIN)/python -m core.training.launch --nproc-per-node $(NPROC) examples/gpt/pretrain_gpt.py \
	    $(WRAPPER) $(ARGS)

test: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m pytest -m 'not long and not gpu' $(ARGS)

# What is too slow for every commit: more ranks, compiled layers, whole runs.
test-long: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m pytest -m 'long and not gpu' $(ARGS)

# What needs a GPU, the functional cases among it, on the GPUs at hand, with $(PYTHON) as it is found: nothing is installed, and what cannot run is
# skipped with its reason.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/functional tests/unit/optimizer tests/unit/transformer $(ARGS)

# Kills, signals, full disks and damage at random moments, for so many minutes or HOURS; prints a report.
MINUTES ?= 10
HOURS   ?=
drill: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m tests.drill $(if $(HOURS),--hours $(HOURS),--minutes $(MINUTES)) $(ARGS)

# Hostile variants of every file that is read, for so many minutes.
fuzz-files: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

# Faults planted in a copy of core, one at a time, each of which the suite has to catch.
mutation: $(VENV)/.installed-train,hf,test
	$(BIN)/python -m tests.mutation $(ARGS)

check: $(VENV)/.installed-train,test,dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.installed-train,test,dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
