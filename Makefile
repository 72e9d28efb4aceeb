# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= runs/demo
JOBS ?= 2
# Transformer Engine needs a CUDA build of torch, which .venv need not have.
TE_VENV := .venv-te
TE_STAMP := $(TE_VENV)/.installed

.PHONY: setup demo test soak check lint docs te-check proto clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: apt-get install python3 python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/spes-mega demo --out $(OUT)

# JOBS files of tests at a time; JOBS=1 where memory is short.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Some minutes; SOAK="--rounds 200 --seed 1 --codec fp32" and the like.
soak: $(STAMP)
	$(BIN)/python -m tests.soak $(SOAK)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site in site/; a link that leads nowhere fails it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint docs test

# The wiring to Transformer Engine, without a GPU. The first time it downloads 5 GB and compiles for about 20 minutes.
te-check: $(TE_STAMP)
	$(TE_VENV)/bin/python -m pytest tests/te

$(TE_STAMP): tests/te/install.sh setup.cfg
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: apt-get install python3 python3-venv"; exit 1; }
	bash tests/te/install.sh $(TE_VENV) $(PYTHON)
	@touch $@

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. spes_mega/wire/proto/*.proto

clean:
	rm -rf $(VENV) $(TE_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
