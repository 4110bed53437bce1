# make setup | check | smoke | test | test-long | bench | charts | demo | docs | compat   (setup installs their requirements)
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(or $(shell command -v $(BIN)/python),python3)
STAMPS := build/.stamps
INSTALL := $(BIN)/uv pip install --quiet
JAR_SOURCES := build/jar.py LICENSE NOTICE $(shell find jvm-shim/src/main python/stagecrew -path python/stagecrew/examples -prune -o \
	\( -name '*.scala' -o -name '*.java' -o -name '*.py' -o -path '*/resources/*' \) -type f -print 2>/dev/null)
JAR := $(STAMPS)/jar
# The newest PySpark of each supported minor version. Development uses the newest one.
SPARK := 4.3.0
OTHER_SPARKS := 4.2.1 4.1.4 4.0.5
EXTRAS := --extra spark --extra zookeeper --extra iceberg --extra postgres --extra demo --extra otel
unexport PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON SPARK_HOME  # each target uses the PySpark of its own environment
ifdef JAVA_HOME  # sbt and the tests use the JDK that is on the PATH
export PATH := $(JAVA_HOME)/bin:$(PATH)
endif

.PHONY: help setup lock jar jars wheel lint check format smoke test test-unit test-jvm test-spark test-matrix test-lowest test-long soak docs docs-version bench \
  charts demo compat clean requirements

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Names everything that this machine lacks for the targets of this command, before anything else is done.
requirements:
	@$(PYTHON) bootstrap --check --for $(MAKECMDGOALS) >/dev/null

setup: $(STAMPS)/installed ## create the environment in .venv, build the jar, install the package

$(STAMPS)/venv: build/requirements.txt | requirements
	@mkdir -p $(STAMPS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $$(grep '^uv==' build/requirements.txt)
	$(INSTALL) --python $(BIN)/python -r build/requirements.txt pyspark==$(SPARK)
	@touch $@

lock: setup ## choose the newest versions that pyproject.toml allows, and write them to build/requirements.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-emit-package pyspark \
	  --no-emit-package py4j $(EXTRAS) --group dev --custom-compile-command "make lock" \
	  --output-file build/requirements.txt pyproject.toml

jar: $(JAR) ## build the jar if its sources changed

$(JAR): $(STAMPS)/venv $(JAR_SOURCES)
	$(BIN)/python build/jar.py
	@touch $@

jars: jar $(OTHER_SPARKS:%=$(STAMPS)/jar-%) ## build the jar for each supported Spark: a release contains all of them

wheel: jars ## build the wheel and the sdist of a release, with all jars, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# An environment with another PySpark, and everything that the tests need.
$(STAMPS)/spark-%: $(STAMPS)/venv
	test -x build/spark-$*/bin/python || $(PYTHON) -m venv build/spark-$*
	$(INSTALL) --python build/spark-$*/bin/python -r build/requirements.txt pyspark==$*
	@touch $@

$(STAMPS)/jar-%: $(STAMPS)/spark-% $(JAR_SOURCES)
	build/spark-$*/bin/python build/jar.py
	$(INSTALL) --python build/spark-$*/bin/python --no-build-isolation --no-deps -e .
	@touch $@

$(STAMPS)/installed: $(JAR)
	$(INSTALL) --python $(BIN)/python --no-build-isolation --no-deps -e .
	@touch $@

format: setup ## format the Python sources
	$(BIN)/ruff format python tests
	$(BIN)/ruff check --fix python tests

lint: setup ## check format, lint, types (also for macOS) and import layers
	$(BIN)/ruff format --check python tests
	$(BIN)/ruff check python tests
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/lint-imports --no-cache

check: lint ## lint, and run the unit tests except the slow ones: under two minutes
	$(BIN)/pytest -q tests/unit -m "not long and not slow" -n 2 --dist loadfile

smoke: setup ## run the unit tests except the slow ones, and one local session from its start to its end: under three minutes
	$(BIN)/pytest -q tests/unit -m "not long and not slow" -n 2 --dist loadfile
	$(BIN)/pytest -q tests/spark/test_smoke.py

test-unit: setup ## run the tests that need no Spark
	$(BIN)/pytest -q tests/unit -m "not long" -n 2 --dist loadfile

test-jvm: setup $(STAMPS)/hadoop ## run the tests of the shim
	build/sbt shim/test

$(STAMPS)/classes: $(STAMPS)/venv tests/archive_classes.py tests/compile_zip.py
	$(BIN)/python tests/compile_zip.py
	$(BIN)/python tests/archive_classes.py
	@touch $@

$(STAMPS)/classes-%: $(STAMPS)/spark-% tests/archive_classes.py tests/compile_zip.py
	build/spark-$*/bin/python tests/compile_zip.py
	build/spark-$*/bin/python tests/archive_classes.py
	@touch $@

$(STAMPS)/hadoop: $(JAR) build.sbt project/build.properties
	build/sbt shim/hadoopJars
	@touch $@

test-spark: setup $(STAMPS)/classes $(STAMPS)/hadoop ## run the tests with real Spark
	@rm -rf build/spark-home/*/work  # local-cluster leaves the folders of its executors here
	$(BIN)/pytest -q tests -m "not long and not wheel" --ignore=tests/unit -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest -q tests/spark/test_hidden_proc.py tests/spark/test_smoke.py -m matrix --hide-proc

test: setup ## run every test with Spark 4.3, except the long ones and those of the wheel: under 20 minutes
	$(MAKE) -j 2 --output-sync=target test-unit-and-docs test-jvm $(STAMPS)/classes
	$(MAKE) test-spark

.PHONY: test-unit-and-docs
test-unit-and-docs: setup
	$(MAKE) lint
	$(MAKE) test-unit
	$(MAKE) docs

test-matrix: test-wheel ## test the wheel with each Spark, and run the contract tests with each other Spark: under 15 minutes; FULL=1 also runs all short tests, YARN and the tests of the shim
	$(foreach spark,$(OTHER_SPARKS),$(MAKE) $(if $(FULL),full,contract)-$(spark) && )true

.PHONY: test-wheel
test-wheel: wheel
	$(BIN)/pytest -q tests/packaging -m wheel -n 2 --dist loadfile

contract-%: jars $(STAMPS)/classes-%
	@echo Spark $*
	build/spark-$*/bin/python -m pytest -q tests -n 2 --dist loadfile --no-loadscope-reorder -m matrix

full-%: jars $(STAMPS)/classes-%
	STAGECREW_PYSPARK_HOME=$$(echo $$PWD/build/spark-$*/lib/python3.*/site-packages/pyspark) \
	  build/sbt shim/hadoopJars shim/test
	build/spark-$*/bin/python -m pytest -q tests/cluster/test_yarn.py
	build/spark-$*/bin/python -m pytest -q tests/unit -m "not long" -n 2 --dist loadfile
	build/spark-$*/bin/python -m pytest -q tests -m "matrix or not (long or wheel)" --ignore=tests/unit -n 2 --dist loadfile \
	  --no-loadscope-reorder

.SECONDARY: $(OTHER_SPARKS:%=$(STAMPS)/spark-%) $(OTHER_SPARKS:%=$(STAMPS)/classes-%)

# An environment with the oldest version of each requirement that pyproject.toml allows.
$(STAMPS)/lowest: pyproject.toml $(STAMPS)/jar-$(lastword $(OTHER_SPARKS))
	test -x build/spark-lowest/bin/python || $(PYTHON) -m venv build/spark-lowest
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --no-deps $(EXTRAS) --output-file $@.txt pyproject.toml
	$(INSTALL) --python build/spark-lowest/bin/python --constraint $@.txt -r pyproject.toml $(EXTRAS) --group test \
	  hatchling editables
	$(INSTALL) --python build/spark-lowest/bin/python --no-build-isolation --no-deps -e .
	@touch $@

# The environment with the oldest requirements lacks the tools of the documentation.
NO_DOCS := $(addprefix --ignore=tests/unit/test_,docs.py docstrings.py readme.py)

test-lowest: $(STAMPS)/lowest $(STAMPS)/hadoop ## run the unit tests and the contract tests with the oldest requirements that pyproject.toml allows
	build/spark-lowest/bin/python -m pytest -q tests/unit -m "not long" -n 2 --dist loadfile $(NO_DOCS)
	build/spark-lowest/bin/python -m pytest -q tests -m matrix -n 2 --dist loadfile --no-loadscope-reorder $(NO_DOCS)

$(STAMPS)/pyright: pyproject.toml $(STAMPS)/venv
	test -x build/pyright/bin/python || $(PYTHON) -m venv build/pyright
	$(INSTALL) --python build/pyright/bin/python --group pyright
	@touch $@

test-long: setup $(STAMPS)/classes $(STAMPS)/hadoop $(STAMPS)/pyright ## run the long seeded runs, the longest file first, the third master, and the contract tests without /proc
	build/pyright/bin/pyright --pythonpath $(BIN)/python tests/typing python/stagecrew/examples
	$(BIN)/pytest -q tests -m "long and alone"
	$(BIN)/pytest -q tests/spark/test_splits.py tests -m "long and not alone" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest -q tests -m "matrix or (contract and not long)" --hide-proc -n 2 --dist loadfile --no-loadscope-reorder
	$(MAKE) test-lowest

soak: setup ## run 10,000 uses of operators and 1,000 topologies, and report leaked threads, files and memory
	cd tests && ../$(BIN)/python soak.py

docs: setup ## build the documentation into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-version: setup ## add the documentation of this version to the branch gh-pages of this clone; it pushes nothing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $$($(BIN)/python -c "import stagecrew; print(stagecrew.__version__)") latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default latest

$(STAMPS)/peers: pyproject.toml $(STAMPS)/venv
	@mkdir -p $(STAMPS)
	test -x build/peers/bin/python || $(PYTHON) -m venv build/peers
	$(INSTALL) --python build/peers/bin/python --group bench
	@touch $@

bench: setup $(STAMPS)/peers ## run the benchmarks, and print the figures as JSON and as a table
	$(BIN)/python tests/benchmarks/run.py

charts: $(STAMPS)/peers ## draw the charts of the documentation from the JSON in docs/assets/bench
	build/peers/bin/python tests/benchmarks/charts.py docs/assets/bench

demo: setup ## enrich real flights with and without stagecrew
	$(BIN)/stagecrew demo

compat: setup ## run PySpark's own tests from SPARK_SOURCE, with and without the plugin
	$(BIN)/python tests/compat/run.py $(SPARK_SOURCE)

clean: ## delete everything that was built
	rm -rf $(STAMPS) build/peers build/pyright build/spark-* build/hadoop site dist \
	  jvm-shim/target target python/stagecrew/jars
