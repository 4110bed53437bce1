"""The public names of `stagecrew.operators` and of its packages."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import stagecrew
import stagecrew.operators

PACKAGES = ["stagecrew.operators", "stagecrew.operators.enumerators", "stagecrew.operators.sinks"]


@pytest.mark.parametrize("name", PACKAGES)
def test_each_public_name_can_be_imported_and_has_a_docstring(name):
    """`__all__` is sorted, `dir` shows it, and each name exists and is documented."""
    package = importlib.import_module(name)
    assert package.__all__ == sorted(set(package.__all__))
    assert dir(package) == package.__all__
    for public in package.__all__:
        assert (getattr(package, public).__doc__ or "").strip(), public


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(name):
    """An unknown name raises the same AttributeError as that of any module."""
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nonsense'"):
        importlib.import_module(name).nonsense  # noqa: B018


def test_the_root_has_the_same_objects():
    """A name that both the root and `stagecrew.operators` export is the same object."""
    both = set(stagecrew.__all__) & set(stagecrew.operators.__all__)
    assert both == {"read_committed"}
    for name in both:
        assert getattr(stagecrew, name) is getattr(stagecrew.operators, name)


def test_importing_the_packages_is_light():
    """Importing the packages loads neither PySpark nor pyarrow nor another heavy library."""
    code = (
        f"import json, sys, {', '.join(PACKAGES)}\n"
        "print(json.dumps(sorted({'pyspark', 'py4j', 'pyarrow', 'numpy', 'pandas'} & set(sys.modules))))"
    )
    environment = {"PYTHONPATH": str(Path(stagecrew.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == []
