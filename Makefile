# Needs Python 3.10 or later with venv, and nothing else. Paths are relative, so that the project may live anywhere.

PYTHON ?= python3
SECONDS ?= 600
python := .venv/bin/python
# The last thing that a finished installation writes: a half-made one is not taken for it.
installed := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test soak matrix mutation lint docs stop clean .venv

help:
	@echo 'make demo      show the locks at work in a small shop'
	@echo 'make test      run the tests, with branch coverage'
	@echo 'make soak      let many processes lock under faults for SECONDS=$(SECONDS); needs pgbouncer'
	@echo 'make matrix    run them on every supported Python, Django and PostgreSQL that is here'
	@echo 'make mutation  break the package in many places, and show that the tests notice'
	@echo 'make lint      check style and types'
	@echo 'make docs      build the site of the documentation in build/docs'
	@echo 'make stop      end the embedded PostgreSQL server'
	@echo 'make clean     end it, and remove its data and all that these targets made'
	@echo 'make .venv     only install; PYTHON=python3.13 make .venv chooses the interpreter'
	@echo
	@echo 'DATABASE_URL, or PGHOST and its relatives, name another server than the embedded one.'

demo: $(installed)
	@$(python) manage.py demo

# Coverage of everything is shown, that of the package is required.
test: $(installed)
	@rm -f .coverage .coverage.*
	@COVERAGE_PROCESS_START=pyproject.toml PYTHONDEVMODE=1 $(python) -m pytest -n 4 --dist loadfile --no-loadscope-reorder
	@$(python) -m coverage combine -q
	@$(python) -m coverage report --include='tests/*'
	@$(python) -m coverage report --include='django_advisory_lock/*' --fail-under=100

# SOAK_REPORT=docs/proof.md writes the figures there, SOAK_SEED=N repeats the choices of a run.
soak: $(installed)
	@SOAK_SECONDS=$(SECONDS) $(python) -m pytest -m soak tests/soak

matrix:
	@"$(PYTHON)" .ci/matrix.py

mutation: $(installed)
	@$(python) -m mutation

# The plugin of mypy imports the settings: with a server named, none is started for it.
lint: $(installed)
	$(python) -m ruff check
	$(python) -m ruff format --check
	DATABASE_URL=postgres:///lint $(python) -m mypy

# No warning is let through, and no network is asked.
docs: $(installed)
	@$(python) -m sphinx -b html -q -W --keep-going -n docs build/docs
	@echo 'The site is in build/docs: open build/docs/index.html'

stop:
	@if [ -e $(installed) ]; then $(python) -m testproject.embedded_postgres down; \
	else echo 'There is no .venv, so no server was started from it.'; fi

clean:
	@if [ -e $(installed) ]; then $(python) -m testproject.embedded_postgres wipe || true; fi
	rm -rf .venv .coverage .coverage.* htmlcov .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name '.?*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

.venv: $(installed)

$(installed): setup.cfg
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo 'There is no $(PYTHON): install Python 3.10 or later, or name one: make PYTHON=...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python 3.10 or later is needed; $(PYTHON) is too old. Name another: make PYTHON=...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || \
		{ echo '$(PYTHON) comes without venv. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@if [ -e $@ ]; then $(python) -m testproject.embedded_postgres down || true; fi
	@rm -f $@
	@echo 'Installing into .venv ...'
	@"$(PYTHON)" -m venv --clear .venv
	@$(python) -m pip install -qq --editable '.[dev]'
	@touch $@
