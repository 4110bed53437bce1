"""Runs the examples in the package's docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pyspark
import pytest

import stagecrew

MODULES = ["stagecrew", *sorted(module.name for module in pkgutil.walk_packages(stagecrew.__path__, "stagecrew."))]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_pass(name):
    """Every example of a module gives the result that it shows, and no example starts Spark."""
    before = pyspark.SparkContext._gateway, pyspark.SparkContext._active_spark_context
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert before == (pyspark.SparkContext._gateway, pyspark.SparkContext._active_spark_context)


def test_docstring_examples_are_found():
    """Examples are found in these modules. If the search found none, the test above would always pass."""
    modules_with_examples = {
        name
        for name in MODULES
        if any(test.examples for test in doctest.DocTestFinder().find(importlib.import_module(name)))
    }
    assert modules_with_examples >= {
        "stagecrew.conf",
        "stagecrew.wire.frames",
        "stagecrew.listeners.resource",
        "stagecrew.jar",
        "stagecrew.testing.resources",
        "stagecrew.testing.harness",
        "stagecrew.coordination.checkpoints",
        "stagecrew.operators.enumerators",
    }
