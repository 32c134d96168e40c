# Two commands matter: `make demo` shows what this project does, `make test` tests it. Both install what they need.

PYTHON ?= python3
PY := .venv/bin/python

# Ansible refuses to run in a locale that is not UTF-8, and a fresh machine's is not.
export LC_ALL := C.UTF-8
unexport PYTHONPATH

.PHONY: help demo test lint up down status clean setup lock docs certify

help:
	@echo 'make demo    install what is needed, bring a local fleet up, run playbooks/enable-gediff.yml on it under load'
	@echo 'make test    install what is needed, run every test; ends with "N passed, N failed"'
	@echo 'make lint    the linters alone'
	@echo 'make up      bring the local fleet up         make down   remove it         make status   look at it'
	@echo 'make setup   install what is needed           make lock   pin Python packages anew'
	@echo 'make docs    write the reference pages from the specs of the roles'
	@echo 'make certify prove the judge by simulation, after a change of its statistics'
	@echo 'make clean   remove all of the above made: containers, networks, images, .venv, .cache'

setup:
	@$(PYTHON) -m tests.local.setup

demo: setup
	@$(PY) -m tests.local demo

test: setup
	@$(PY) -m tests.local.suite

lint: setup
	@$(PY) -m tests.local.suite lint

up: setup
	@$(PY) -m tests.local up

down:
	@$(PYTHON) -m tests.local down

status:
	@$(PYTHON) -m tests.local status

clean:
	@$(PYTHON) -m tests.local clean

# The whole proof of the gate; about a minute on two cores. Commit what it writes.
certify: setup
	@$(PY) -m dsv4_fleet judge --certify --output dsv4_fleet/judge/certificate.json --table docs/judge-certificate.md

lock:
	@$(PYTHON) -m tests.local.lock

docs: setup
	@$(PY) docs/generate.py
