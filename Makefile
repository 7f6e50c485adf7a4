# Everything runs in .venv, which is made from pyproject.toml under the pins of constraints.txt. `make demo` and
# `make test` do all set-up by themselves on a machine that has Python 3.10 or newer and make.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test deep lint docs pytest pytest-openclip deep-pytest deep-openclip times ranges fuzz faults peers bench pins release clean

# The first Python on the path that is new enough.
PYTHON ?= $(shell for python in python3 python3.{14,13,12,11,10}; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$python; break; }; done)
# Images often say that Python shall not keep compiled modules: each of the tests' many processes would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready
OPENCLIP_READY := .venv-openclip/.ready
STORES_READY := .venv-stores/.ready
DOCS_READY := .venv-docs/.ready
# Run beside the webdataset of both environments.
WEBDATASET_TESTS = tests/integrations/test_webdataset.py
RELEASE_READY := .venv-release/.ready
OPENCLIP_TESTS = $(wildcard tests/*/test_*openclip*.py tests/openclip/test_*.py)

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## *' '{printf "%-10s%s\n", $$1, $$2}'

demo: $(READY)  ## Train a small CLIP while its shards arrive (about a minute)
	$(BIN)/python examples/demo.py

# Two at a time, each to its end, whatever fails; what one says is shown when it ends.
TOGETHER := --no-print-directory --keep-going --jobs=2 --output-sync=target
test: $(READY) $(OPENCLIP_READY) $(DOCS_READY)  ## Check everything (style, types, import contract, docs, tests) but what `make deep` does
	@$(call PARTS,pytest lint docs pytest-openclip)

# Compared with BASE, or those of one room: ROOM=cache.
BASE ?= main
quick: lint docs  ## Check style, types, docs and the tests of what changed since BASE=main, or of one room: ROOM=cache
	files=$$($(BIN)/python .ci/quick.py $(BASE) $(ROOM)); \
	[ -z "$$files" ] || $(BIN)/python -u -m pytest -m "not deep" --numprocesses 4 --dist worksteal $$files || [ $$? = 5 ]

# By the schemas of the oldest Kubernetes that the manifests are for, and of the newest that the package knows.
lint: $(READY)  ## Check style, names, types, the import contract and the manifests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python .ci/names.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/kubernetes-validate --kubernetes-version 1.28 --kubernetes-version 1.37 --strict --quiet --no-warn deploy/kubernetes/*.yaml

# Every page is read anew: Sphinx shows the warnings of a page only when it reads it.
docs: $(DOCS_READY)  ## Build the documentation into docs/_build/html (warnings are errors)
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --doctree-dir docs/_build/doctrees docs docs/_build/html

# Many tests wait for processes, disks and servers: four at a time keep two cores busy. Their deadlines can be missed by
# a busy machine: one or two that fail are run again, by themselves, and have to pass then (.ci/reruns.py has the rules).
TESTED = $(2)/python -u .ci/reruns.py $@ $(1)
# The parts of a target; what was forgiven is printed last, as make fails or not.
PARTS = $(MAKE) $(TOGETHER) $(1) && status=0 || status=$$?; \
	echo; $(BIN)/python .ci/reruns.py --show $(filter %pytest %openclip,$(1)); exit $$status
# Torch has one thread in each of the many processes: two wait for each other on two busy cores.
quick pytest pytest-openclip deep-pytest deep-openclip ranges: export OMP_NUM_THREADS = 1

# Prometheus' own parser reads what is exported, a browser shows what is drawn, FUSE mounts what is copied, and Slurm
# runs the batch scripts.
pytest: $(READY)
	@for package in prometheus chromium "fuse3 fusermount3" "munge munged" slurmctld slurmd "slurm-client srun"; do \
		bash .ci/need $$package || echo "The tests that need $$package are skipped." >&2; done
	$(call TESTED,4,$(BIN)) "not deep"

# Tests with open_clip in their name run its own code, which needs an older webdataset; the others leave them out.
pytest-openclip: $(OPENCLIP_READY)
	$(call TESTED,2,.venv-openclip/bin) "not deep" $(OPENCLIP_TESTS) $(WEBDATASET_TESTS)

# Those marked deep, and no other file is imported.
DEEP_TESTS = $(shell grep -lE 'mark\.(deep|sampled)' $(wildcard tests/*/test_*.py))
deep: $(READY) $(OPENCLIP_READY)  ## Run the tests that are long by nature: benchmarks' quick forms, faults, simulation, long trainings
	@$(call PARTS,deep-pytest deep-openclip)
deep-pytest: $(READY)
	$(call TESTED,4,$(BIN)) deep $(filter-out $(OPENCLIP_TESTS),$(DEEP_TESTS))
deep-openclip: $(OPENCLIP_READY)
	$(call TESTED,2,.venv-openclip/bin) deep $(filter $(OPENCLIP_TESTS),$(DEEP_TESTS))

TARGETS ?= test deep demo
times: $(READY) $(OPENCLIP_READY) $(DOCS_READY)  ## Time TARGETS="test deep demo", and write that into CONTRIBUTING.md
	$(BIN)/python .ci/times.py $(TARGETS)

# pip resolves the newest alone, uv the oldest, too; what these need in turn is the newest in both. uv reads none of pip's
# settings: say UV_INDEX or UV_FIND_LINKS where packages come from elsewhere. The oldest have wheels up to Python 3.12.
define TESTED_WITH
	$(BIN)/uv venv --quiet --clear --seed --python $(BIN)/python .venv-$(1)
	$(BIN)/uv pip install --quiet --python .venv-$(1)/bin/python --resolution $(1) --editable '.[dev]'
	$(call TESTED,4,.venv-$(1)/bin) "not deep"
endef

ranges: $(READY)  ## Run the tests with the oldest and with the newest dependencies (25 minutes, and gigabytes)
	$(call TESTED_WITH,lowest-direct)
	$(call TESTED_WITH,highest)

# Another seed each time; a failure shows the seed and the number of its case.
CASES ?= 1000000
SEED ?= $(shell date +%s)
fuzz: $(READY)  ## Fuzz the parsers of tars, indexes and URLs, and the C code with sanitizers (CASES=1000000 of each, SEED)
	$(BIN)/python -m tests.fuzzing --cases $(CASES) --seed $(SEED)

# A peer that can't be built is left out, and said to be.
peers: $(READY) $(OPENCLIP_READY)  ## Build the environments of the peers that are measured beside us
	$(BIN)/python -m benchmarks.environments.build || true

bench: peers  ## Measure beside the peers (about 3 hours); writes benchmarks/results/*.json
	for name in cold cold_large link_busy warm overhead handover decode_workers start scaling consumer half resume memory flat memory_tier hits small_cache fill held small_shards converted mount looking \
		verification prepared strategies module_cache row_memory row_columns features facts metrics_cost buckets bucket_groups packing naflex_step journal daemons shuffle arrival mixing_policies mixing_clip reporting scale nodes report shuffle_report; do \
		$(BIN)/python -m benchmarks.$$name; done

faults: $(READY) $(STORES_READY)  ## Meet every fault many times (about an hour); writes benchmarks/results/{faults,simulation}.json
	$(BIN)/python -m tests.simulation --seeds 0:10000 --jobs $$(nproc) --out benchmarks/results/simulation.json
	$(BIN)/python -m tests.oracle replay
	$(BIN)/python -m tests.planted --jobs $$(nproc)
	$(BIN)/python -m tests.faults
	$(BIN)/python -m benchmarks.reliability

# The stamp is written last: an interrupted set-up is taken up where it was, a finished one isn't done again.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard streamload/transforms/*.[ch])
	@[ -n "$(PYTHON)" ] || { echo "Python 3.10 or newer is needed: install it, or say PYTHON=/path/to/python" >&2; exit 1; }
	@bash .ci/need curl
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || bash .ci/need python3-venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# A child of .venv: it sees all that .venv has, behind what it has itself, and adds only what it lacks.
$(OPENCLIP_READY): $(READY) tests/openclip/constraints.txt
	rm -rf .venv-openclip
	$(BIN)/python -m venv --without-pip .venv-openclip
	parent=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$(.venv-openclip/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$parent')" > "$$own/parent.pth"
	.venv-openclip/bin/python -m pip install --quiet --constraint tests/openclip/constraints.txt \
		"$$(grep '^torch==' constraints.txt)" torchvision 'open_clip_torch[training]'
	.venv-openclip/bin/python .ci/openclip.py
	@touch $@

# A child of .venv like .venv-openclip: Sphinx needs a newer docutils than awscli, of the tests, allows.
$(DOCS_READY): $(READY) docs/constraints.txt
	rm -rf .venv-docs
	$(BIN)/python -m venv --without-pip .venv-docs
	parent=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$(.venv-docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$parent')" > "$$own/parent.pth"
	.venv-docs/bin/python -m pip install --quiet --no-warn-conflicts --constraint docs/constraints.txt sphinx furo myst-parser
	@touch $@

# Real S3 stores for the faults; s3rver only where there is npm.
$(STORES_READY): $(READY) benchmarks/stores/requirements.txt benchmarks/stores/package-lock.json
	rm -rf .venv-stores
	$(BIN)/python -m venv .venv-stores
	.venv-stores/bin/python -m pip install --quiet --requirement benchmarks/stores/requirements.txt
	if command -v npm > /dev/null; then \
		cp benchmarks/stores/package.json benchmarks/stores/package-lock.json .venv-stores/; \
		npm ci --prefix .venv-stores --no-audit --no-fund; \
	fi
	@touch $@

pins:  ## Resolve all dependencies anew into constraints.txt
	rm -rf .venv-pins
	$(PYTHON) -m venv .venv-pins
	.venv-pins/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" '.[dev]'
	.venv-pins/bin/python .ci/pins.py > constraints.new
	.venv-pins/bin/python .ci/hashes.py constraints.new docker
	mv constraints.new constraints.txt
	rm -rf .venv-pins

# Those on the path are tried; with pyenv say which it shall offer: PYENV_VERSION=3.10.13:3.12.1
PYTHONS ?= 3.10 3.12 3.13 3.14
# The links of the README, and those in the metadata, need a place where the repository's files can be had: URL.
release: $(RELEASE_READY)  ## Build and check sdist and wheels in dist/, and try them on each of PYTHONS (URL=https://... of the files)
	.venv-release/bin/python .ci/release.py build $(URL)
	.venv-release/bin/python .ci/release.py check
	.venv-release/bin/python .ci/release.py try $(PYTHONS)

$(RELEASE_READY): .ci/release-requirements.txt
	rm -rf .venv-release
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --requirement $<
	@touch $@

clean:  ## Remove the environments and everything that tools left
	rm -rf .venv .venv-* docs/_build streamload/transforms/*.so build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
