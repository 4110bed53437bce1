"""Public names that are imported when they are first used.

`import stagecrew` loads neither PySpark nor pyarrow, because Spark's Python daemon imports it too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from stagecrew.spark_version import installed_spark, require_supported

__all__ = ["lazy_names"]

#: By missing package: the remedy in the message.
_REMEDIES: Final = {
    **dict.fromkeys(
        ("pyspark", "py4j"),
        "PySpark: `pip install 'stagecrew[spark]'`, or add the PySpark in SPARK_HOME to PYTHONPATH",
    ),
    "pyarrow": "pyarrow: `pip install 'stagecrew[spark]'`",
}


def lazy_names(package: str, names: Mapping[str, str], modules: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, which imports a name when it is first used.

    Args:
        package: The `__name__` of the package.
        names: The names, each with its module inside the package.
        modules: The modules of the package that are also imported when they are first used.

    Returns:
        A function for PEP 562. It raises AttributeError for an unknown name, ModuleNotFoundError with a remedy if
        PySpark or pyarrow is missing, and ConfigurationError if the import fails and the installed Spark is not
        supported.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        except ImportError as error:
            if (version := installed_spark()) is not None:
                require_supported(version)
            if isinstance(error, ModuleNotFoundError) and error.name in _REMEDIES:
                raise ModuleNotFoundError(f"{package}.{name} needs {_REMEDIES[error.name]}", name=error.name) from error
            raise

    return get
