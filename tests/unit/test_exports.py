"""What `import stagecrew` gives, and what it does not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stagecrew

PACKAGE = str(Path(stagecrew.__file__).parents[1])


def fresh(code: str, *path: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter that has this package, and warnings as errors."""
    environment = {"PYTHONPATH": ":".join([*path, PACKAGE]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_all_is_sorted_and_importable():
    """Each public name is there, once, and `dir` shows the same."""
    assert stagecrew.__all__ == sorted(set(stagecrew.__all__))
    for name in stagecrew.__all__:
        assert getattr(stagecrew, name) is not None
    assert dir(stagecrew) == stagecrew.__all__


def test_every_name_that_can_be_imported_is_in_all():
    """Nothing else of ours is public: no name without an underscore beside the modules of the package."""
    result = fresh(
        "import json, types, stagecrew\n"
        "for name in stagecrew.__all__: getattr(stagecrew, name)\n"
        "public = [n for n, v in vars(stagecrew).items() if not n.startswith('_') and not isinstance(v, types.ModuleType)]\n"
        "print(json.dumps(sorted(set(public) | set(stagecrew._LAZY))))"
    )
    assert result.stderr == ""
    allowed = {"Any", "TYPE_CHECKING", "annotations"}
    assert set(json.loads(result.stdout)) - allowed == set(stagecrew.__all__) - {"__version__"}


def test_every_error_is_public():
    """All of `stagecrew.errors` can be caught by its name in `stagecrew`."""
    from stagecrew import errors

    assert set(errors.__all__) <= set(stagecrew.__all__)


def test_public_names_are_documented():
    """Each has a docstring of its own."""
    for name in stagecrew.__all__:
        if name != "__version__":
            assert (getattr(stagecrew, name).__doc__ or "").strip(), name


def test_an_unknown_name():
    """It is an AttributeError like that of any module."""
    with pytest.raises(AttributeError, match="module 'stagecrew' has no attribute 'nonsense'"):
        stagecrew.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        from stagecrew import nonsense  # noqa: F401


def test_importing_is_light():
    """Neither PySpark nor pandas nor pyarrow is loaded, no thread started, no signal taken, nothing printed."""
    result = fresh(
        "import json, signal, sys, threading\n"
        "signals = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "import stagecrew, stagecrew.listeners.listener, stagecrew.wire.frames, stagecrew.conf, stagecrew.worker.lifecycle\n"
        "import stagecrew.worker.hooks, stagecrew.wire.channel, stagecrew.worker.descriptions, stagecrew.worker.process\n"
        "import stagecrew.worker.agent, stagecrew.testing\n"
        "assert signals == [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "heavy = {'pyspark', 'py4j', 'pandas', 'pyarrow', 'numpy', 'click', 'rich', 'psutil', 'asyncio'}\n"
        "print(json.dumps([sorted(heavy & set(sys.modules)), threading.active_count()]))"
    )
    assert result.stderr == ""
    assert json.loads(result.stdout) == [[], 1]


def test_the_daemon_is_light():
    """The entry of the Python daemon loads what PySpark's own daemon loads, and starts no thread before it forks."""
    result = fresh(
        "import json, sys, threading\n"
        "import pyspark.daemon\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import stagecrew.worker.daemon\n"
        "more = {name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)\n"
        "print(json.dumps([sorted(more), threading.active_count()]))"
    )
    assert result.stderr == ""
    assert json.loads(result.stdout) == [["stagecrew"], 1]


@pytest.mark.parametrize("name", ["configure", "Crew", "TopologyReport"])
def test_without_pyspark_the_error_says_what_to_install(name, tmp_path):
    """The names that need PySpark say so; the others work."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text(
        "raise ModuleNotFoundError('No module named pyspark', name='pyspark')"
    )
    code = f"import stagecrew\nstagecrew.Listener()\nstagecrew.{name}"
    result = fresh(code, str(tmp_path))
    if name == "TopologyReport":
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 1
        assert f"ModuleNotFoundError: stagecrew.{name} needs PySpark: `pip install 'stagecrew[spark]'`" in result.stderr


def test_the_version_is_that_of_the_jar():
    """`__version__` is the one version; the jar's name carries it."""
    assert f"-{stagecrew.__version__}.jar" in stagecrew.jar_path()
