# `make demo` and `make test` need python3 (3.11 or later) and make; the environment is made once, in .venv.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Modules are compiled when they are first imported: of the environment's 18,000 most never are.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint docs wheel bench ascend clean

demo: $(INSTALLED)
	$(PYTHON) -m forkpoint demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n logical --dist worksteal

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

wheel: $(INSTALLED)
	$(PYTHON) scripts/try_wheel.py

bench: $(INSTALLED)
	$(PYTHON) -m benchmarks.scheduler
	$(PYTHON) -m benchmarks.cpu_peers $(BENCH_OPTIONS)
	$(PYTHON) -m benchmarks.engine

ascend: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/ascend
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p tests.ascend.as_npu tests/engine/test_llm.py
	scripts/ascend_env.sh
	scripts/ascend.sh

clean:
	rm -rf $(VENV) .ascend build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamp comes last, so that an installation that broke off is done again.
# editable_mode=compat: otherwise a program next to a checkout named forkpoint imports that folder instead.
$(INSTALLED): pyproject.toml Makefile
	test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "making the environment in $(VENV): torch is large, this takes some minutes"
	$(PYTHON) -m pip install --quiet --no-compile --config-settings editable_mode=compat -e '.[dev]'
	touch $@
