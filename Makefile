# Two commands matter:  make course  (the first chapters, end to end)   and   make test  (everything CI runs).
# Both build .venv first; they need Python 3.11 or newer and make, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
ONLY   ?=

.PHONY: course test lint bench gpu transformers lab doctor install exercises nbgrader clean

course: install
	@$(BIN)/minitrain doctor
	@$(BIN)/minitrain run 00 01 02 03
	@echo "Open them in JupyterLab with: make lab"

test: install
	@$(BIN)/python -m pytest --atlas -n $(JOBS) --dist loadscope \
		--nbval --nbval-current-env --nbval-cell-timeout=120 --nbval-sanitize-with=notebooks/nbval.cfg tests notebooks

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: install
	@$(BIN)/python -m benchmarks $(ONLY)

gpu: install               # on a machine with a CUDA GPU: the tests that need one, then steps in bf16 and FP8 beside torchao's
	@test -d build/torchao || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/torchao torchao
	@$(BIN)/python -m pytest -m cuda tests
	@$(BIN)/python -m benchmarks.gpu

transformers: install      # benchmarks/moe.py runs beside its Mixtral block; it is no dependency, so it stands outside the venv
	@test -d build/transformers || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target build/transformers transformers==5.23.0

lab: install
	@$(BIN)/minitrain lab

doctor: install
	@$(BIN)/minitrain doctor

exercises: install
	@$(BIN)/python -m minitrain.course.exercises build

nbgrader: install          # proves that student notebooks are what nbgrader would write; it is no dependency, so it has a venv of its own
	@test -x build/nbgrader/bin/nbgrader || ($(PYTHON) -m venv build/nbgrader && build/nbgrader/bin/pip install --quiet nbgrader==0.9.6)
	@NBGRADER=$(CURDIR)/build/nbgrader/bin/nbgrader $(BIN)/python -m pytest tests/course/test_exercises.py

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python %d.%d found; minitrain needs 3.11 or newer: make PYTHON=python3.12" % v[:2])'
	@echo "Installing into $(VENV) (the first time takes a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[course,test]"
	@touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
