"""The examples in the docstrings of the package are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pyspark
import pytest

import stagecrew

MODULES = ["stagecrew", *sorted(found.name for found in pkgutil.walk_packages(stagecrew.__path__, "stagecrew."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name):
    """Every example of a module gives what it shows, and none of them starts Spark."""
    before = pyspark.SparkContext._gateway, pyspark.SparkContext._active_spark_context
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert before == (pyspark.SparkContext._gateway, pyspark.SparkContext._active_spark_context)


def test_the_examples_are_found():
    """The modules that have examples are looked into: a search that finds none would pass for ever."""
    found = {
        name
        for name in MODULES
        if any(test.examples for test in doctest.DocTestFinder().find(importlib.import_module(name)))
    }
    assert found >= {
        "stagecrew.conf",
        "stagecrew.wire.frames",
        "stagecrew.listeners.resource",
        "stagecrew.jar",
        "stagecrew.testing.resources",
        "stagecrew.testing.harness",
        "stagecrew.coordination.checkpoints",
        "stagecrew.operators.enumerators",
    }
