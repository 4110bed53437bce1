# make setup | check | test | test-long | bench | demo | docs | compat      (what they need is installed by setup)
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/.stamps
JAR_SOURCES := build.sbt project/build.properties $(shell find jvm-shim/src/main python/stagecrew -name '*.scala' -o -name '*.java' -o -name '*.py' -o -path '*/resources/*' -type f 2>/dev/null)
JAR := $(STAMPS)/jar
unexport PYSPARK_PYTHON

.PHONY: help setup jar check format test test-unit test-jvm test-spark test-long soak docs bench demo compat clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMPS)/installed ## the environment in .venv, the jar, the package

$(STAMPS)/venv: pyproject.toml
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "stagecrew needs Python >= 3.11: make PYTHON=python3.11"; exit 1; }
	@command -v java >/dev/null || { echo "Spark needs a JDK 17 or newer (Debian: apt-get install openjdk-17-jdk-headless)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); x = p["project"]["optional-dependencies"]; \
	  wanted = {r for k in ("spark", "postgres", "iceberg", "zookeeper", "demo", "docs", "dev") for r in x[k] if not r.startswith("stagecrew[")}; \
	  print("\n".join(sorted(wanted | set(p["project"]["dependencies"]))))' > $(STAMPS)/requirements.txt
	$(BIN)/python -m pip install -q -r $(STAMPS)/requirements.txt
	@touch $@

jar: $(JAR) ## the jar, when its sources changed

$(JAR): $(STAMPS)/venv $(JAR_SOURCES)
	build/sbt shim/package shim/hdfsJar
	@touch $@

$(STAMPS)/installed: $(JAR)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

format: setup ## formats the Python sources
	$(BIN)/ruff format python tests
	$(BIN)/ruff check --fix python tests

check: setup ## format, lint, types, import layers and unit tests: under two minutes
	$(BIN)/ruff format --check python tests
	$(BIN)/ruff check python tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -q tests/unit -m "not long" -n 2 --dist loadfile

test-unit: setup ## the tests without Spark
	$(BIN)/pytest -q tests/unit -m "not long" -n 2 --dist loadfile

test-jvm: setup ## the shim's own tests
	build/sbt shim/test

$(STAMPS)/classes: $(STAMPS)/venv tests/archive_classes.py tests/compile_zip.py
	$(BIN)/python tests/compile_zip.py
	$(BIN)/python tests/archive_classes.py build/spark-classes.jsa
	@touch $@

test-spark: setup $(STAMPS)/classes ## the tests with real Spark
	@rm -rf $(VENV)/lib/python3*/site-packages/pyspark/work  # where local-cluster leaves its executors' folders
	$(BIN)/pytest -q tests -m "not long" --ignore=tests/unit -n 2 --dist loadfile --no-loadscope-reorder

test: setup ## every test but the long seeded runs: under 20 minutes
	$(MAKE) -j 2 --output-sync=target check-and-docs test-jvm $(STAMPS)/classes
	$(MAKE) test-spark

.PHONY: check-and-docs
check-and-docs: setup
	$(MAKE) check
	$(MAKE) docs

test-long: setup $(STAMPS)/classes ## the long seeded runs, the longest file first, and the third master
	$(BIN)/pytest -q tests/spark/test_splits.py tests -m long -n 2 --dist loadfile --no-loadscope-reorder

soak: setup ## 10,000 uses of operators, then 1,000 topologies: what they leave in threads, files and memory
	cd tests && ../$(BIN)/python soak.py

docs: setup ## the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(STAMPS)/peers: pyproject.toml
	@mkdir -p $(STAMPS)
	test -x build/peers/bin/python || $(PYTHON) -m venv build/peers
	$(PYTHON) -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"]))' > $@.txt
	build/peers/bin/python -m pip install -q -r $@.txt
	@touch $@

bench: setup $(STAMPS)/peers ## the figures, as JSON and a table
	$(BIN)/python tests/benchmarks/run.py

demo: setup ## the main job, with and without stagecrew
	$(BIN)/stagecrew demo

compat: setup ## PySpark's own tests out of SPARK_SOURCE, plugin on and off
	$(BIN)/python tests/compat/run.py $(SPARK_SOURCE)

clean: ## what was built
	rm -rf $(STAMPS) build/peers build/spark-classes.jsa build/hdfs.jar site dist jvm-shim/target target python/stagecrew/jars
