# make train, make test: everything from a machine that has only Python >= 3.10

PYTHON ?= python3
BIN = .venv/bin
SHARE ?= 1.0

train: .venv/installed
	$(BIN)/python train.py config/method3_2.py

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -n auto --dist loadfile

soak: .venv/installed-dev  # kills, damaged files, random command lines; SHARE=0.1: a tenth of them
	$(BIN)/python tests/soak.py --share=$(SHARE)

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(BIN)/pip install -q -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv

.PHONY: train test soak clean
