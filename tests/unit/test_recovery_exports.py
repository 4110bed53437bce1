"""The public names of `stagecrew.recovery`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stagecrew
from stagecrew import recovery


def test_public_names_are_sorted_documented_and_the_same_as_at_the_root():
    """Each public name can be imported and has a docstring. `dir` lists exactly these names. A name that the root also
    exports is the same object there."""
    assert recovery.__all__ == sorted(recovery.__all__)
    assert dir(recovery) == recovery.__all__
    assert set(recovery._LAZY) == set(recovery.__all__)
    for name in recovery.__all__:
        assert (getattr(recovery, name).__doc__ or "").strip(), name
        if name in stagecrew.__all__:
            assert getattr(stagecrew, name) is getattr(recovery, name)


def test_an_unknown_name_is_an_attribute_error():
    """An unknown name raises the same AttributeError as that of any module."""
    with pytest.raises(AttributeError, match="module 'stagecrew.recovery' has no attribute 'nonsense'"):
        recovery.nonsense  # noqa: B018


def test_importing_the_package_is_light():
    """Importing the package loads neither PySpark nor pyarrow nor another heavy library, and starts no thread."""
    code = (
        "import json, sys, threading, stagecrew.recovery\n"
        "heavy = {'pyspark', 'pyarrow', 'kazoo', 'tenacity', 'click'}\n"
        "print(json.dumps([sorted(heavy & set(sys.modules)), threading.active_count()]))"
    )
    environment = {"PYTHONPATH": str(Path(stagecrew.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(ended.stdout) == [[], 1]
