# SPDX-License-Identifier: GPL-3.0-or-later
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
ENGINE := .cache/sglang-cpu
ENGINE_PYTEST := .cache/engine-pytest
TRAINERS := .cache/trainers
INVENTORY := inventories/local
# The collection of the checkout comes first, wherever the command is called from.
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/playbooks/collections:$(HOME)/.ansible/collections:/usr/share/ansible/collections
export PATH := $(BIN):$(PATH)
# Tests have an ansible.cfg of their own.
export ANSIBLE_PIPELINING := true

SCENARIO ?= default
# Tests at once, where none is in another's way.
JOBS ?= $(shell n=$$(nproc) && echo $$((n < 8 ? n : 8)))
PYTEST_ARGS ?=
# Unit tests of which CI plays a part.
PLAYED := $(shell grep -l 'import PLAYED' tests/unit/test_*.py)

.PHONY: help
help: ## what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null \
	    || { echo "$(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there), and the controller needs Python 3.11 or later. Name one: make PYTHON=/path/to/python3.11"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "$(PYTHON) has no venv. Install it (Debian, Ubuntu: apt-get install python3-venv), or name another: make PYTHON=..."; exit 1; } >&2
	@echo "== virtual environment $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.%: requirements/%.txt requirements/controller.txt $(VENV)/.python
	@echo "== installing $<"
	@$(BIN)/python -m pip install --disable-pip-version-check -qq --requirement $<
	@touch $@

.PHONY: venv
venv: $(VENV)/.controller ## the virtual environment .venv with Ansible

.PHONY: engine
engine: $(VENV)/.controller ## a real SGLang for the CPU, and its tiny model, in .cache/sglang-cpu
	ansible-playbook demo/engine.yml -i $(INVENTORY)

.PHONY: demo
demo: engine ## the whole job on this machine: engine, sources, extract.yml, summary
	$(BIN)/python demo/make_sources.py --output .demo/sources
	ansible-playbook playbooks/extract.yml -i $(INVENTORY)
	@cat .demo/report/summary.txt

.PHONY: test
test: lint gates unit trainers matrix releases e2e ## lint, gates, unit tests, the trainers' loaders, the patcher on released sources, real servers, end to end

.PHONY: lint
lint: $(VENV)/.test ## ansible-lint (production), ruff, yamllint
	ruff check .
	ruff format --check .
	yamllint --strict .
	ansible-lint --strict

.PHONY: format
format: $(VENV)/.test ## write the Python files as `make lint` wants them
	ruff check --fix .
	ruff format .

.PHONY: gates
gates: $(VENV)/.test ## the rules of the repository
	python -m pytest tests/gates $(PYTEST_ARGS)

$(ENGINE_PYTEST)/.done: requirements/engine-test.txt | engine
	@echo "== installing $<"
	@$(ENGINE)/venv/bin/python -m pip install --disable-pip-version-check -qq --upgrade --target $(ENGINE_PYTEST) --requirement $<
	@touch $@

.PHONY: unit
unit: $(VENV)/.test engine $(ENGINE_PYTEST)/.done ## unit tests, with the engine's interpreter where they need torch
	python -m pytest tests/unit --ignore tests/unit/engine --numprocesses $(JOBS) $(PYTEST_ARGS)
	PYTHONPATH=$(ENGINE_PYTEST) $(ENGINE)/venv/bin/python -m pytest tests/unit/engine --numprocesses $(JOBS) $(PYTEST_ARGS)

$(TRAINERS)/.done: requirements/trainers.txt | engine
	@echo "== installing $<"
	@$(ENGINE)/venv/bin/python -m pip install --disable-pip-version-check -qq --no-deps --upgrade --target $(TRAINERS) --requirement $<
	@touch $@

.PHONY: trainers
trainers: engine $(ENGINE_PYTEST)/.done $(TRAINERS)/.done ## the loaders of SpecForge, speculators and ModelOpt read what is written here
	PYTHONPATH=$(ENGINE_PYTEST):$(TRAINERS) $(ENGINE)/venv/bin/python -m pytest tests/trainers $(PYTEST_ARGS)

.PHONY: matrix
matrix: $(VENV)/.test ## the patcher on the released sources of SGLang; RELEASES=all takes every release
	python -m pytest tests/releases --ignore tests/releases/engine $(PYTEST_ARGS)

.PHONY: releases
releases: engine $(ENGINE_PYTEST)/.done ## real servers of several releases against transformers; SERVERS=all runs every case
	PYTHONPATH=$(ENGINE_PYTEST) $(ENGINE)/venv/bin/python -m pytest tests/releases/engine --verbose $(PYTEST_ARGS)

.PHONY: e2e
e2e: $(VENV)/.test engine ## the end-to-end test on the real engine
	python -m pytest tests/integration --numprocesses $(JOBS) --verbose $(PYTEST_ARGS)

.PHONY: molecule
molecule: $(VENV)/.molecule ## the same job in a container with systemd; SCENARIO=default
	molecule test --scenario-name $(SCENARIO)

.PHONY: drills
drills: $(VENV)/.molecule $(VENV)/.test engine ## every release of SGLang, as source and as server, a fleet that loses and gains hosts, hosts that are left alone, 200 crashes of an extraction, and every molecule scenario but the default one
	$(MAKE) matrix RELEASES=all
	$(MAKE) releases SERVERS=all
	PLAYS=all python -m pytest $(PLAYED) --numprocesses $(JOBS) --verbose $(PYTEST_ARGS)
	DRILLS=all FAULTS=$${FAULTS:-200} python -m pytest tests/integration/test_[45789]_*.py --capture=no --verbose $(PYTEST_ARGS)
	@for scenario in $$(cd molecule && ls -d */ | tr -d / | grep -v -x default); do molecule test --scenario-name "$$scenario"; done

.PHONY: sanity
sanity: $(VENV)/.test ## ansible-test sanity
	python tests/sanity/run.py

.PHONY: build
build: $(VENV)/.controller ## the collection as an archive
	ansible-galaxy collection build --force

.PHONY: bench
bench: $(VENV)/.test ## a measured claim: NAME=... (one of bench/)
	@test -n "$(NAME)" && test -e bench/$(NAME).py || { echo "make bench NAME=..., one of: $$(ls bench/*.py 2>/dev/null | xargs -r -n1 basename -s .py | tr '\n' ' ')"; exit 1; } >&2
	python bench/$(NAME).py

.PHONY: clean
clean: ## remove what was made here, but for the caches in .cache
	rm -rf $(VENV) .demo .ansible tests/output hidden_state-bridge-*.tar.gz
