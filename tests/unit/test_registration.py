"""The names in `spark.stagecrew.listeners` are imported on the driver when the session starts."""

from __future__ import annotations

import sys

import pytest

import stagecrew
from stagecrew.session.registration import check_imports

MODULE = """
import stagecrew

class Pool(stagecrew.Listener): pass

class Holder:
    inner = Pool()

@stagecrew.resource
def needs_dsn(context, dsn): yield dsn

@stagecrew.resource
def orders(context): yield 1

number = 7
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
    (tmp_path / "named_pools").mkdir()
    (tmp_path / "named_pools" / "__init__.py").write_text(MODULE)
    (tmp_path / "named_broken.py").write_text("import no_such_module_of_the_test\n")
    (tmp_path / "named_raising.py").write_text("raise RuntimeError('no license')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("named_")]:
        del sys.modules[name]


def test_importable_names(caplog):
    """A name can refer to an instance, or to a class or resource that needs no arguments. Empty names are ignored."""
    check_imports("named_pools:Holder.inner, named_pools:Pool,named_pools:orders ,, ")
    check_imports("")
    assert caplog.records == []


def test_a_missing_top_level_module_is_only_a_warning(caplog):
    """If the driver does not have a top-level module, it only logs a warning with the configured name.

    The module may exist only on the executors.
    """
    check_imports("no_such_module_here:pool,named_pools:orders,no_such_package.inner:pool")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        "'no_such_module_here:pool' in spark.stagecrew.listeners needs the module 'no_such_module_here'"
    )
    assert "'no_such_package.inner:pool'" in second


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("named_pools:absent", "AttributeError: module 'named_pools' has no attribute 'absent'"),
        ("named_pools.inner:pool", "ModuleNotFoundError: No module named 'named_pools.inner'"),
        ("named_broken:pool", "ModuleNotFoundError: No module named 'no_such_module_of_the_test'"),
        ("named_raising:pool", "RuntimeError: no license"),
        ("named_pools:needs_dsn", "missing a required argument: 'dsn'"),
        ("named_pools:number", "refers to an object of type int, not to a stagecrew.Listener"),
        ("named_pools", "not of the form module:name"),
    ],
)
def test_any_other_problem_fails_the_start(target, why):
    """The session does not start if a name has the wrong form, cannot be imported, needs arguments, or is no listener."""
    with pytest.raises(stagecrew.errors.ListenerError) as raised:
        check_imports(f"named_pools:orders,{target}")
    assert str(raised.value).startswith(f"{target!r} in spark.stagecrew.listeners")
    assert why in str(raised.value)
    assert "on this executor" not in str(raised.value)
