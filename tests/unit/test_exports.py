"""The public names of `stagecrew`, and the cost of importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stagecrew

PACKAGE = str(Path(stagecrew.__file__).parents[1])


def run_python(code: str, *path: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter that can import this package. Warnings are errors."""
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
    """`__all__` is sorted, contains each name once, and all names exist. `dir` shows the same names."""
    assert stagecrew.__all__ == sorted(set(stagecrew.__all__))
    for name in stagecrew.__all__:
        assert getattr(stagecrew, name) is not None
    assert dir(stagecrew) == stagecrew.__all__


def test_every_name_that_can_be_imported_is_in_all():
    """Every name without a leading underscore that can be imported, except modules, is in `__all__`."""
    result = run_python(
        "import json, types, stagecrew\n"
        "for name in stagecrew.__all__: getattr(stagecrew, name)\n"
        "public = [n for n, v in vars(stagecrew).items()\n"
        "          if not n.startswith('_') and not isinstance(v, types.ModuleType)]\n"
        "print(json.dumps(sorted(set(public) | set(stagecrew._LAZY))))"
    )
    assert result.stderr == ""
    allowed = {"TYPE_CHECKING", "annotations"}
    assert set(json.loads(result.stdout)) - allowed == set(stagecrew.__all__) - {"__version__"}


#: The public names of the root package. These are the names that most users type, at most 45.
ROOT_NAMES = """
    Checkpoint Coordinator CoordinatorContext Crew Evaluation Gateway LatencySummary Lifetime Listener ListenerContext
    ListenerReport LoggingContext Operator OperatorReport PartitionReport Release Resource Scope StagecrewError
    StructuredFormatter Task TaskGateway Topology TopologyReport TraceContext __version__ configure crew current_job
    is_active jar_path read_committed resource spark_conf
"""


def test_the_root_has_the_names_that_most_users_type():
    """The root has exactly these names. A new public name belongs to a submodule, unless most users type it."""
    assert stagecrew.__all__ == ROOT_NAMES.split()
    assert len(stagecrew.__all__) <= 45


def test_public_modules_are_attributes_of_the_root():
    """`import stagecrew` is enough to use `stagecrew.operators` and the other public modules."""
    result = run_python(
        "import stagecrew\n"
        "print(stagecrew.errors.CommitFailed.__name__, stagecrew.operators.FileCommitLog.__name__,\n"
        "      stagecrew.recovery.JobSpec.__name__, stagecrew.testing.opened.__name__)",
        *(path for path in sys.path if path.endswith("site-packages")),
    )
    assert result.stderr == ""
    assert result.stdout.split() == ["CommitFailed", "FileCommitLog", "JobSpec", "opened"]


def test_every_error_is_in_the_module_of_errors():
    """All errors are in `errors.__all__` and in the tree in its docstring, and all but TaskKilled have one base."""
    from stagecrew import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(errors.__all__)
    assert errors.__all__ == sorted(classes)
    drawn = [
        next(word for word in line.split() if word[0].isalpha())
        for line in (errors.__doc__ or "").splitlines()
        if line.startswith("    ") and any(word in classes for word in line.split())
    ]
    assert sorted(drawn) == sorted(classes)
    assert all(issubclass(getattr(errors, name), stagecrew.StagecrewError) for name in classes - {"TaskKilled"}), (
        "one `except` must catch all of them"
    )


def test_public_names_are_documented():
    """Every public name has a docstring."""
    for name in stagecrew.__all__:
        if name != "__version__":
            assert (getattr(stagecrew, name).__doc__ or "").strip(), name


def test_an_unknown_name_is_an_attribute_error():
    """For an unknown name, `stagecrew` raises the same errors as any module."""
    with pytest.raises(AttributeError, match="module 'stagecrew' has no attribute 'nonsense'"):
        stagecrew.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        from stagecrew import nonsense  # noqa: F401


def test_importing_stagecrew_is_light():
    """Importing stagecrew loads no large package, starts no thread, sets no signal handler and prints nothing."""
    result = run_python(
        "import json, signal, sys, threading\n"
        "signals = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "import stagecrew, stagecrew.listeners.listener, stagecrew.wire.frames, stagecrew.conf\n"
        "import stagecrew.worker.lifecycle, stagecrew.worker.hooks, stagecrew.wire.channel\n"
        "import stagecrew.worker.descriptions, stagecrew.worker.process\n"
        "import stagecrew.worker.agent, stagecrew.testing\n"
        "assert signals == [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "heavy = {'pyspark', 'py4j', 'pandas', 'pyarrow', 'numpy', 'click', 'rich', 'psutil', 'asyncio'}\n"
        "print(json.dumps([sorted(heavy & set(sys.modules)), threading.active_count()]))"
    )
    assert result.stderr == ""
    assert json.loads(result.stdout) == [[], 1]


def test_importing_the_daemon_is_light():
    """Importing the daemon loads only the packages that PySpark's daemon loads, and stagecrew. It starts no thread."""
    result = run_python(
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
    """Without PySpark, only names that need it raise an error, which says what to install."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text(
        "raise ModuleNotFoundError('No module named pyspark', name='pyspark')"
    )
    code = f"import stagecrew\nstagecrew.Listener()\nstagecrew.{name}"
    result = run_python(code, str(tmp_path))
    if name == "TopologyReport":
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 1
        assert f"ModuleNotFoundError: stagecrew.{name} needs PySpark: `pip install 'stagecrew[spark]'`" in result.stderr


def test_without_pyarrow_the_error_says_what_to_install(tmp_path):
    """Without pyarrow, a name that needs it raises an error, which says what to install."""
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('No module named pyarrow', name='pyarrow')")
    result = run_python("import stagecrew.operators\nstagecrew.operators.Files", str(tmp_path))
    assert result.returncode == 1
    message = "ModuleNotFoundError: stagecrew.operators.Files needs pyarrow: `pip install 'stagecrew[spark]'`"
    assert message in result.stderr


def test_the_jar_has_the_version_of_the_package():
    """The name of the jar contains the version of the package."""
    assert f"-{stagecrew.__version__}.jar" in stagecrew.jar_path()
