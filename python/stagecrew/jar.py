"""The path of the jar, and the Spark properties that enable the plugin.

This module does not import PySpark, so that the `stagecrew` command starts quickly.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from stagecrew._version import __version__
from stagecrew.conf import PLUGIN
from stagecrew.errors import ConfigurationError

__all__ = ["SPARK_LINE", "found_spark_submit", "jar_path", "joined", "spark_conf"]

#: The Spark version that the jar is built for, as major.minor.
SPARK_LINE: Final = "4.3"


def jar_path() -> str:
    """Returns the path of this package's jar.

    Returns:
        An absolute path.

    Raises:
        ConfigurationError: This installation has no jar.

    Examples:
        >>> import stagecrew
        >>> stagecrew.jar_path().endswith(".jar")
        True

        On the command line: `spark-submit --jars $(stagecrew jar) ...`.
    """
    jars = sorted(
        Path(str(importlib.resources.files("stagecrew"))).joinpath("jars").glob(f"stagecrew_*-{__version__}.jar")
    )
    if not jars:
        raise ConfigurationError(
            f"the installation of stagecrew {__version__} has no jar: reinstall it (`pip install --force-reinstall "
            f"stagecrew`), or run `make jar` in a checkout"
        )
    return str(jars[0])


def found_spark_submit() -> str:
    """Returns the path of spark-submit: in SPARK_HOME if it is set, otherwise in the installed PySpark.

    Raises `ConfigurationError` if there is no spark-submit there.
    """
    home = os.environ.get("SPARK_HOME")
    if home is None:
        import importlib.util

        spec = importlib.util.find_spec("pyspark")
        if spec is None or spec.origin is None:
            raise ConfigurationError(
                "this needs spark-submit: install PySpark here (pip install 'stagecrew[spark]'), or set SPARK_HOME"
            )
        home = str(Path(spec.origin).parent)
    program = str(Path(home) / "bin" / "spark-submit")
    if not os.access(program, os.X_OK):
        raise ConfigurationError(f"{program} is not an executable file: install PySpark, or correct SPARK_HOME")
    return program


def spark_conf(
    *, listeners: Sequence[str] = (), jvm_listeners: Sequence[str] = (), plugins: str = "", jars: str = ""
) -> dict[str, str]:
    """Returns the Spark properties that enable stagecrew, for `spark-submit --conf` or `spark-defaults.conf`.

    Args:
        listeners: Python listeners of the application, as `module:name`.
        jvm_listeners: Names of classes that implement `stagecrew.TopologyListener`.
        plugins: The current value of `spark.plugins`, to which stagecrew's plugin is appended.
        jars: The current value of `spark.jars`, to which stagecrew's jar is appended.

    Returns:
        The properties by their names.

    Raises:
        ConfigurationError: This installation has no jar.

    Examples:
        >>> spark_conf(listeners=["pools:orders"], plugins="com.example.Other")["spark.plugins"]
        'com.example.Other,stagecrew.StagecrewPlugin'
    """
    conf = {"spark.plugins": joined(plugins, PLUGIN), "spark.jars": joined(jars, jar_path())}
    if listeners:
        conf["spark.stagecrew.listeners"] = ",".join(listeners)
    if jvm_listeners:
        conf["spark.stagecrew.jvmListeners"] = ",".join(jvm_listeners)
    return conf


def joined(*lists: str) -> str:
    """Joins comma-separated lists, in order and without repeats. Two spellings of one path are one entry."""
    found: dict[str, str] = {}
    for one in ",".join(lists).split(","):
        if entry := one.strip():
            found.setdefault(_same_file(entry), entry)
    return ",".join(found.values())


def _same_file(entry: str) -> str:
    # spark-submit turns `b.jar` into `file:///a/b.jar`; a class name stays unchanged.
    url = urlsplit(entry)
    if url.scheme == "file" and not url.netloc:
        return os.path.realpath(unquote(url.path))
    return os.path.realpath(entry) if not url.scheme and ("/" in entry or entry.endswith(".jar")) else entry
