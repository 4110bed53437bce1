"""The names in `spark.stagecrew.listeners` are imported on the driver when the session starts."""

from __future__ import annotations

import sys

import pytest

import stagecrew
from stagecrew.session.registration import import_named

MODULE = """
import stagecrew

class Pool(stagecrew.Listener): pass

class Holder:
    inner = Pool()

@stagecrew.resource
def takes(context, dsn): yield dsn

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
    """The configured names, separated by commas, can refer to instances, classes and resources without arguments."""
    import_named("named_pools:Holder.inner, named_pools:Pool,named_pools:orders ,, ")
    import_named("")
    assert caplog.records == []


def test_a_missing_module_is_a_warning(caplog):
    """A missing module is only a warning that names it, because the module could exist on the executors alone."""
    import_named("no_such_module_here:pool,named_pools:orders,no_such_package.inner:pool")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("the driver has no module 'no_such_module_here', which 'no_such_module_here:pool'")
    assert "'no_such_package.inner:pool'" in second


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("named_pools:absent", "AttributeError: module 'named_pools' has no attribute 'absent'"),
        ("named_pools.inner:pool", "ModuleNotFoundError: No module named 'named_pools.inner'"),
        ("named_broken:pool", "ModuleNotFoundError: No module named 'no_such_module_of_the_test'"),
        ("named_raising:pool", "RuntimeError: no license"),
        ("named_pools:takes", "missing a required argument: 'dsn'"),
        ("named_pools:number", "is a int, not a stagecrew.Listener"),
        ("named_pools", "not of the form module:name"),
    ],
)
def test_any_other_problem_fails_the_start(target, why):
    """A missing attribute, an exception during the import, or an object that is not a listener fails the start of the
    session."""
    with pytest.raises(stagecrew.errors.ListenerError) as raised:
        import_named(f"named_pools:orders,{target}")
    assert str(raised.value).startswith(f"{target!r} in spark.stagecrew.listeners")
    assert why in str(raised.value)
    assert "on this executor" not in str(raised.value)
