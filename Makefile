# Everything a newcomer runs. Each target installs what it needs into .venv of this checkout, once.
PYTHON ?= python3
# Another torch than that of constraints.txt, or another Python, each in an environment of its own:
# make test TORCH=2.11.0 PYTHON=python3.13
TORCH  ?=
VENV   := .venv$(TORCH:%=-torch-%)$(patsubst python%,-python-%,$(filter-out python python3,$(notdir $(PYTHON))))
BIN    := $(VENV)/bin
# Ranks of `make train`: one for each GPU, or two on CPU.
GPUS   := $(if $(filter cpu,$(SHARDSTACK_DEVICE)),0,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'))
NPROC  ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
ARGS   ?=
# Processes that share out the tests, each with ranks of its own, in all about 3 GB; 0 is this one, for a debugger.
JOBS   ?= 2
# What `make train` trains: gpt, or moe, the same with experts in the place of MLPs, as many active parameters a token.
MODEL  ?= gpt
MOE    := --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm
# What wraps the model in `make train`; empty means replicas (DDP).
WRAPPER ?= --use-torch-fsdp2
export OMP_NUM_THREADS := 1
# Tests start some hundred processes: each would compile all of core again.
unexport PYTHONDONTWRITEBYTECODE

# What meets torch's private and newer interfaces, in two to three minutes: CI runs it on the oldest and the newest torch too.
SHORT  := $(addprefix tests/unit/, $(addsuffix .py, adapters/bridge/test_replicas tensor_parallel/test_weight_gradients \
          $(addprefix distributed/, model/test_unit_cases model/test_offloaded_activations model/test_forward_hooks \
          test_torch_fully_sharded_data_parallel test_data_parallel_base test_fully_sharded_data_parallel_config \
          $(addprefix fsdp2/, test_prefetch test_fsdp2_engine test_unit_collectives test_precision test_shard_model \
          test_torch_private)) \
          $(addprefix transformer/moe/, test_dispatch test_experts test_moe_layer test_router) \
          optimizer/muon/test_rule optimizer/test_averaged_weights weights/test_stream)) \
          tests/unit/comm/test_out_of_step.py::test_the_flight_recorder_names_collectives_of_other_code \
          "tests/functional/test_equality_of_wrappers.py::test_wrappers_are_equal_bitwise_on_two_ranks[bf16-fsdp2-2]" \
          $(addprefix tests/functional/, test_pipelines.py test_experts.py test_muon.py)

# Extras that `make test-short` installs; ARGS may name tests of more.
EXTRAS ?= train,test

# What the tests need: the trainers that core/adapters knows are among it.
OTHERS := $(VENV)/.installed-train,trackers,hf,lightning,ray,megatron,titan,trl,fp8,docs,release,test
TESTED := $(OTHERS) $(VENV)/.installed-verl

# verl, and what its workers import that the others lack. Their metadata would have older transformers and packaging.
VERL   := verl tensordict pyvers hydra-core omegaconf antlr4-python3-runtime codetiming pylatexenc

# Each process begins with its share of the files, in their order; one that is done takes tests of another's end.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: train test test-short test-newest test-long test-gpu gpu-first gpu-wheels gpu-results drill fuzz-files fuzz mutation docs help release check fix clean

# A stamp per set of extras: nothing is installed again until the metadata or the constraints change. All cores compile
# what is imported; pip would compile the rest too, on one.
$(VENV)/.installed-%: pyproject.toml setup.py $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$*]'
	@$(BIN)/python -m compileall -q -j 0 -x '/(ray|transformers/models|tests?)/' $(VENV)/lib > $(VENV)/compiled.log 2>&1 || true
	@touch $@

$(VENV)/.installed-verl: $(OTHERS)
	$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check -c $(VENV)/constraints.txt $(VERL)
	@touch $@

# With TORCH everything but torch stays as constrained, and setuptools is free: torch 2.11 needs one before 82. The
# registry's torch would bring 2.5 GB of libraries for GPUs: tests/install_torch.py leaves them out, and says how.
$(VENV)/constraints.txt: constraints.txt $(TORCH:%=tests/install_torch.py)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
	@cp constraints.txt $@
else
	$(BIN)/python tests/install_torch.py $(TORCH)
	@(grep -v -e '^torch==' -e '^setuptools==' constraints.txt; echo torch==$(TORCH)) > $@
endif

train: $(VENV)/.installed-train
	$(BIN)/python -m core.training.launch --nproc-per-node $(NPROC) examples/gpt/pretrain_gpt.py \
	    $(WRAPPER) $(if $(filter moe,$(MODEL)),$(MOE)) $(ARGS)

test: $(TESTED)
	$(PYTEST) -m 'not long and not gpu' $(ARGS)

test-short: $(VENV)/.installed-$(EXTRAS)
	$(PYTEST) -m 'not long and not gpu' $(SHORT) $(ARGS)

# The newest release of torch and of each trainer, without our constraints: a line says which door breaks.
test-newest:
	$(PYTHON) tests/newest.py

# What is too slow for every commit: more ranks, compiled layers, whole runs.
test-long: $(TESTED)
	$(PYTEST) -m 'long and not gpu' $(ARGS)

# What needs a GPU, the functional cases among it, on the GPUs of this machine, with $(PYTHON) as it is found: nothing is
# installed, and what is missing is an error that names it. Only files with such tests are collected: others import more.
# Six processes take it in less than ten minutes on one GPU.
GPU_JOBS ?= 6
test-gpu:
	files=$$($(PYTHON) -m tests.gpu_machine) && \
	    PYTHONPATH=$(CURDIR)/.gpu-wheels/site:$$PYTHONPATH \
	    $(PYTHON) -m pytest -n $(GPU_JOBS) --dist worksteal -m gpu $$files $(ARGS)

# What to run first where there is a GPU, in stages of at most eight minutes, in the order in which it tells most. Each
# runs alone too: ONLY=speed. What it shows is in the new folder RESULTS, and packed there.
RESULTS ?=
ONLY    ?=
gpu-first:
	@$(PYTHON) -m tests.gpu_first $(if $(ONLY),--only $(ONLY)) $(if $(RESULTS),--results '$(RESULTS)') $(ARGS)

# Packages for `make gpu-first` that a usual CUDA image lacks, and the commit, in .gpu-wheels, for a machine that has no
# network and gets a copy of this checkout.
gpu-wheels: $(VENV)/constraints.txt
	$(BIN)/python -m tests.gpu_first.wheels constraints.txt

# Takes golden values and figures out of an archive of `make gpu-first` into this checkout of the same commit.
ARCHIVE ?=
gpu-results: $(VENV)/.installed-train,test
	@$(BIN)/python -m tests.gpu_first.take_in '$(ARCHIVE)'

# Kills, signals, full disks and damage at random moments, for so many minutes or HOURS; prints a report.
MINUTES ?= 10
HOURS   ?=
drill: $(TESTED)
	$(BIN)/python -m tests.drill $(if $(HOURS),--hours $(HOURS),--minutes $(MINUTES)) $(ARGS)

# Hostile variants of every file that is read, for so many minutes.
fuzz-files: $(TESTED)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

# Random compositions of features, each compared with one process, for so many minutes; a SEED repeats a run.
SEED    ?=
fuzz: $(TESTED)
	$(BIN)/python -m tests.compositions --minutes '$(MINUTES)' --seed '$(SEED)' $(ARGS)

# Plants faults in a copy of core, one at a time; the suite has to catch each.
mutation: $(TESTED)
	$(BIN)/python -m tests.mutation $(ARGS)

# The pages of docs/ and the packages as a site, in site/; a dead link or anchor is an error.
docs: $(VENV)/.installed-train,docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

# Builds the distributions, checks them in a new environment, and tags the commit; TAG=no is a rehearsal without the tag.
TAG     ?=
release: $(VENV)/.installed-train,release
	$(BIN)/python -m tests.release $(if $(filter no,$(TAG)),--no-tag)

check: $(VENV)/.installed-train,test,dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Writes the flags that `shardstack COMMAND --help` shows, from the programs' own parsers.
help: $(VENV)/.installed-train,docs
	$(BIN)/python docs/flags.py

fix: $(VENV)/.installed-train,test,dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-* build dist site alias/*.egg-info
