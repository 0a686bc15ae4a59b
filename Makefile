# `make` says what there is. Every target first builds .venv, with Python 3.11 or newer; TORCH=cpu or TORCH=cuda names
# the build of PyTorch, if the one that minitrain/course/install.py takes by itself is not wanted.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 4
ONLY   ?=
ARGS   ?=
TORCH  ?=

.DEFAULT_GOAL := help
.PHONY: help course test lint bench gpu gpus transformers triton lab doctor install exercises explorers nbgrader book links clean asked

help:
	@echo "make course     chapters 00 to 03 from the first cell to the last, about two minutes"
	@echo "make lab        JupyterLab over your own copies of chapters and exercises, in work/"
	@echo "make doctor     is everything here that is needed?"
	@echo "make test       everything that CI runs     (make lint, explorers, bench ONLY=..., gpu, gpus: see the file)"
	@echo "make book       the course as a site without a network, in build/book/site; make links checks every link of it"
	@echo "make clean      remove .venv and what was built; work/ and your answers stay"
	@echo "Each installs into .venv first. make TORCH=cuda or TORCH=cpu ... names the build of PyTorch."

course: install
	@$(BIN)/minitrain doctor
	@$(BIN)/minitrain run 00 01 02 03
	@echo "Open them in JupyterLab with: make lab"

test: export PYTHONDONTWRITEBYTECODE =   # hundreds of processes import minitrain: compiled once
test: install
	@$(BIN)/python -m pytest -p tests.light --atlas --durations=40 -n $(JOBS) --dist loadscope --no-loadscope-reorder \
		--nbval --nbval-current-env --nbval-cell-timeout=3600 --nbval-sanitize-with=notebooks/nbval.cfg $(ARGS) tests notebooks

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: install
	@$(BIN)/python -m benchmarks $(ONLY)

gpu: install               # one CUDA GPU, 9 minutes at most: benchmarks/gpu says what it runs; FP8 stands beside torchao's, if it can be had
	@test -d build/torchao || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/torchao torchao || true
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

gpus: install              # the same for a node with two or more
	@$(BIN)/python -m benchmarks.gpu --node $(ARGS)

transformers: install      # benchmarks/moe.py runs beside its Mixtral block; it is no dependency, so it stands outside the venv
	@test -d build/transformers || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target build/transformers transformers==5.23.0

triton: install            # its kernels on a CPU, interpreted; 1 GB, and a torch for CUDA brings its own, so it is no dependency
	@$(BIN)/python -c "import triton" 2>/dev/null || test -d build/triton || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/triton triton==3.9.0
	@$(BIN)/python -m pytest tests/systems/kernels/test_triton.py

lab: install
	@$(BIN)/minitrain lab $(ARGS)

doctor: install
	@$(BIN)/minitrain doctor

exercises: install
	@$(BIN)/python -m minitrain.course.exercises build

explorers: install         # numbers of docs/book/explorers against minitrain's, in headless Chromium, or else in node
	@$(BIN)/python -W ignore docs/book/explorers/check.py $(ARGS)

nbgrader: install          # proves that student notebooks are what nbgrader would write; it is no dependency, so it has a venv of its own
	@test -x build/nbgrader/bin/nbgrader || ($(PYTHON) -m venv build/nbgrader && build/nbgrader/bin/pip install --quiet nbgrader==0.9.6)
	@NBGRADER=$(CURDIR)/build/nbgrader/bin/nbgrader $(BIN)/python -m pytest tests/course/test_exercises.py

book: build/book/venv/installed    # from what is committed: nothing is executed, so .venv is not needed
	@build/book/venv/bin/python docs/book/make.py

links:                     # of the site that was built last; outside links are listed, not fetched
	@$(PYTHON) docs/book/links.py

build/book/venv/installed: docs/book/requirements.txt    # Sphinx is no dependency, so it has a venv of its own
	@$(PYTHON) -m venv --clear build/book/venv
	@build/book/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt minitrain/course/install.py $(if $(TORCH),asked)
	@TORCH=$(TORCH) $(PYTHON) minitrain/course/install.py $(VENV)
	@touch $@

asked:

clean:                     # work/ stays: your answers are in it
	rm -rf $(VENV) runs build *.egg-info
