# make train, make test: everything from a machine that has only Python >= 3.10

PYTHON ?= python3
BIN = .venv/bin

train: .venv/installed
	$(BIN)/python train.py config/method3_2.py

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q

soak: .venv/installed-dev  # train.py killed at a hundred random moments
	$(BIN)/python tests/soak.py 100

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
