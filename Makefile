# The two commands: `make check` and `make test`. Both set up .venv first (once); afterwards they work offline.
#   make check PYTHON=/path/to/python   reuses the torch of that Python (a ROCm, Jetson or nightly build)
#   make check OUT=out ARGS="--op rms_norm"
VENV ?= .venv
OUT ?= out
ARGS ?=
JOBS ?= 2
RUN := $(VENV)/bin
# Some virtual machines list AMX and refuse its instructions: oneDNN's bfloat16 products then end the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Each of the many processes would compile all of src again, and each worker rewrite all asserts.
unexport PYTHONDONTWRITEBYTECODE
# Threads on top of JOBS test processes only make each other wait.
LIMITS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# PYTHON names the interpreter; only if the caller named it is its torch reused.
ifdef PYTHON
  BOOT := $(PYTHON)
  REUSE := --reuse
else
  BOOT := python3
  REUSE :=
endif

.PHONY: help setup check simulate stand-in test test-slow test-all test-gpu lint format docs clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The script compares a fingerprint of its inputs and of the interpreter, and does nothing when they are as they were.
setup: ## .venv with torch and the tested set
	@$(BOOT) ci/environment.py $(VENV) $(REUSE)

check: setup ## ferryman check, and a model, on the device here
	$(RUN)/ferryman check --out $(OUT) $(ARGS)
	$(RUN)/ferryman check --model qwen3 $$($(RUN)/python -c "import torch; print('' if torch.cuda.is_available() else '--tiny')") --out $(OUT)

stand-in: setup ## an A100's Triton kernels on the newer NVIDIA device here, through their PTX; FOR=orin-agx: another's
	$(RUN)/ferryman check --as $(or $(FOR),a100) --out $(OUT) $(ARGS)

simulate: setup ## AMD code executed on this CPU: ARGS="--device mi355x --backend triton"
	$(LIMITS) $(RUN)/ferryman check --backend simulated --out $(OUT) $(ARGS)

# Each process begins with files of its own (worksteal): what a file's tests share is made once, and nobody waits for it.
test: setup ## the quick tests, of large families those of today; ARGS="--day all": every one
	$(LIMITS) $(RUN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# What a file's tests share is made by one process (loadgroup); the longest tests begin first.
test-slow: setup ## the tests that take minutes, all; ARGS="--share 0/4": a quarter of them
	$(LIMITS) $(RUN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder -m "slow and not gpu" --timeout 1800 $(ARGS)

test-all: setup ## every test that needs no device: the quick ones of all days, and the slow ones
	$(LIMITS) $(RUN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder -m "not gpu" --day all --timeout 1800 $(ARGS)

test-gpu: setup ## the tests that need a device
	$(RUN)/python -m pytest -q -m gpu $(ARGS)

lint: setup ## ruff and mypy
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: setup ## ruff's fixes and format
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

docs: setup ## what follows from the code and from results: settings, ops, the simulator's instructions, the schema, README's tables
	$(RUN)/python ci/docs.py
	$(RUN)/python ci/readme.py
	$(RUN)/python ci/stubs.py

clean: ## what make made
	rm -rf $(VENV) $(OUT)
