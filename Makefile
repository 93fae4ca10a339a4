# make install | demo | test | test-deploy | test-hosts | nightly | lint. Needs Python 3.11 and pip; torch is installed exactly as constraints.txt says.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test nightly lint clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt benchmarks/papers/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]' -e benchmarks/papers
	touch $(STAMP)

demo: install
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -n 2
	$(BIN)/python -m pytest -n 2 tests/device

# A federation of real processes on the loopback, with Flower and the versions it wants. Up to fifteen minutes.
# FLWR=1.42: the same tests against that version of flwr, in a venv beside the first.
FLWR ?= 1.41
DEPLOY := tests/deploy/.venv$(if $(filter-out 1.41,$(FLWR)),-flwr$(FLWR))
.PHONY: test-deploy
test-deploy: $(DEPLOY)/.installed
	SORDINO_FLWR=$(FLWR) OMP_NUM_THREADS=1 $(DEPLOY)/bin/python -m pytest -W default tests/deploy

# Five machines on this one, by the commands of docs/deploy.md. Needs root and iproute2: it makes network namespaces.
.PHONY: test-hosts
test-hosts: $(DEPLOY)/.installed
	SORDINO_HOSTS=1 OMP_NUM_THREADS=1 $(DEPLOY)/bin/python -m pytest -W default tests/deploy/test_across_hosts.py

# A round beside an echo, and CPU beside Flower's subprocess mode, as ratios. About five minutes; not in CI.
.PHONY: bench-deploy
bench-deploy: $(DEPLOY)/.installed
	OMP_NUM_THREADS=1 $(DEPLOY)/bin/python -m pytest -W default -s tests/deploy/bench_wire.py tests/deploy/bench_secure_sum.py

$(DEPLOY)/.installed: pyproject.toml constraints.txt tests/deploy/constraints.txt
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/pip install --quiet --upgrade pip
	$(DEPLOY)/bin/pip install --quiet $$(grep '^torch==' constraints.txt)
	sed -E '$(if $(filter-out 1.41,$(FLWR)),/^(certifi|flwr|uv)==/d)' tests/deploy/constraints.txt > $(DEPLOY)/constraints.txt
	$(DEPLOY)/bin/pip install --quiet -c $(DEPLOY)/constraints.txt 'flwr==$(FLWR).*' -e '.[flower]' pytest hypothesis cryptography numba
	touch $@

# Ten thousand mutated configurations, each with five seconds and a gigabyte; ten thousand jobs, replies, policies, ledgers
# and letters of a secure sum; two rounds of every plan of the papers' own size on the simulated device; all 2^28 seeds
# of Flower's masks; sixty kills of any process of a federation. An hour and a half.
nightly: install $(DEPLOY)/.installed
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/contracts/test_any_configuration.py
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/ledger/test_ledger_processes.py tests/ledger/test_ledger_damage.py
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/engines/test_jobs.py tests/ledger/test_policy.py
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/device/test_paper_scale.py
	HYPOTHESIS_PROFILE=nightly $(DEPLOY)/bin/python -m pytest -W default tests/deploy/test_secure_sum.py tests/deploy/test_seed_search.py
	SORDINO_KILLS=60 OMP_NUM_THREADS=1 $(DEPLOY)/bin/python -m pytest -W default -s tests/deploy/test_on_one_machine.py -k killed

# Sdist and wheel, checked in an empty venv; notes from CHANGELOG.md; a tag (ARGS=--no-tag: none).
.PHONY: release
release: install
	$(BIN)/python scripts/release.py $(ARGS)

lint: install
	$(BIN)/ruff check src tests examples benchmarks/papers scripts
	$(BIN)/ruff format --check src tests examples benchmarks/papers scripts
	$(BIN)/mypy

clean:
	rm -rf .venv build dist src/*.egg-info

# Beside the peers: benchmarks/peers/NAME.txt is installed in benchmarks/peers/.venv-NAME. Up to 20 minutes; not in CI.
PEERS := benchmarks/peers
PEER_TEXTS := $(filter-out $(PEERS)/jax.txt,$(wildcard $(PEERS)/*.txt))
PEER_VENVS := $(patsubst $(PEERS)/%.txt,$(PEERS)/.venv-%/.installed,$(PEER_TEXTS))
.PHONY: bench-peers
bench-peers: install $(PEER_VENVS) bench-lint
	$(BIN)/python $(PEERS)/federated.py --minutes 12.5
	$(BIN)/python $(PEERS)/run.py --minutes 6.5

# What the peers themselves claim for the settings of docs/lint.md, in lint.json. A minute, and their installation.
.PHONY: bench-lint
bench-lint: $(foreach name,opacus pfl flwr jax,$(PEERS)/.venv-$(name)/.installed)
	$(PEERS)/.venv-flwr/bin/pip install --quiet --no-deps --ignore-requires-python fl4health==0.4.2
	$(PYTHON) $(PEERS)/lint_claims.py

# DP-SGD on nets drawn at random, beside plain SGD and Opacus: time and memory of a step. Up to 15 minutes; not in CI.
.PHONY: bench-nets
bench-nets: install $(PEERS)/.venv-opacus/.installed
	nice $(BIN)/python benchmarks/random_nets/bench.py $(ARGS)

# Strategies of correlated noise beside jax_privacy's: noise of sums and time. A few minutes; ARGS=--long: many.
.PHONY: bench-strategies
bench-strategies: install $(PEERS)/.venv-jax/.installed
	$(BIN)/python $(PEERS)/strategies.py $(ARGS)

$(PEERS)/.venv-%/.installed: $(PEERS)/%.txt
	$(PYTHON) -m venv $(PEERS)/.venv-$*
	! grep -q '^torch==' $< || $(PEERS)/.venv-$*/bin/pip install --quiet $$(grep '^torch==' $<)
	$(PEERS)/.venv-$*/bin/pip install --quiet -r $<
	touch $@

# Ourselves against the stored baseline, as ratios to a fixed kernel. Under 3 minutes; exit code 1 if something got slower.
.PHONY: bench bench-update
bench: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/own/bench.py

bench-update: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/own/bench.py --update

# The pages as a site, in site/; a warning is an error. The pages themselves are checked by the tests.
.PHONY: site
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: install
	$(BIN)/python docs/reference.py
.PHONY: docs

# Everything that only a real accelerator shows: device tests, steps beside Opacus, engine paths, TF32. Writes bench-gpu/.
.PHONY: bench-gpu
bench-gpu: install
	$(BIN)/python benchmarks/device/bench.py $(ARGS)
