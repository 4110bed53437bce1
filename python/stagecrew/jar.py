"""The paths of the jars, and the Spark properties that enable the plugin.

This module does not import PySpark, so that the `stagecrew` command starts quickly.
"""

from __future__ import annotations

import importlib.resources
import os
import zipimport
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stagecrew._version import __version__
from stagecrew.conf import PLUGIN
from stagecrew.errors import ConfigurationError
from stagecrew.spark_version import SPARK_LINES, installed_spark, line_of, require_supported

__all__ = ["found_spark_submit", "installed_jars", "jar_path", "joined", "spark_conf"]


def jar_path(spark: str | None = None) -> str:
    """Returns the path of this package's jar for a version of Spark.

    Args:
        spark: A version of Spark, such as `4.2` or `4.2.1`. The default is the installed Spark: that of SPARK_HOME if
            it is set, otherwise that of PySpark.

    Returns:
        An absolute path. If this package was imported from a jar (`--py-files`), the path of that jar.

    Raises:
        ConfigurationError: stagecrew does not support this version of Spark.
        ConfigurationError: This installation has no jar for it.
        ConfigurationError: Spark is not installed, and this installation has several jars.

    Examples:
        >>> import stagecrew
        >>> stagecrew.jar_path().endswith(".jar")
        True

        On the command line: `spark-submit --jars "$(stagecrew jar)" ...`.
    """
    version = spark or installed_spark()
    if version is not None:
        require_supported(version)
    if (archive := _own_archive()) is not None:
        return archive
    jars = installed_jars()
    if not jars:
        raise ConfigurationError(
            f"the installation of stagecrew {__version__} has no jar: reinstall it from the wheel of a "
            "release (in a checkout: run `make jar`)"
        )
    has = f"this installation of stagecrew {__version__} has jars for Spark {', '.join(jars)}"
    if version is None:
        if len(jars) > 1:
            raise ConfigurationError(
                f"{has}, and Spark is not installed here: name its version, as in `stagecrew jar --spark "
                f"{SPARK_LINES[-1]}`"
            )
        version = next(iter(jars))
    if (found := jars.get(line_of(version))) is None:
        raise ConfigurationError(
            f"{has}, and not for Spark {version}: install the wheel of a release, which has all jars (in a "
            "checkout: `make jars`)"
        )
    return found


def installed_jars() -> dict[str, str]:
    """Returns the paths of this package's jars by the version of Spark that they are built for, as major.minor."""
    folder = Path(str(importlib.resources.files("stagecrew")), "jars")
    found = {line: sorted(folder.glob(f"stagecrew-spark-{line}_*-{__version__}.jar")) for line in SPARK_LINES}
    return {line: str(jars[0]) for line, jars in found.items() if jars}


def _own_archive() -> str | None:
    """Returns the path of the jar that this package was imported from. None if it was imported from a folder."""
    loader = getattr(__spec__, "loader", None)
    return str(Path(loader.archive).absolute()) if isinstance(loader, zipimport.zipimporter) else None


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
    """Joins comma-separated lists, in order and without repeats.

    Two spellings of one path are one entry, and so are two copies of this package's jar.
    """
    found: dict[str, str] = {}
    for one in ",".join(lists).split(","):
        if entry := one.strip():
            found.setdefault(_same_file(entry), entry)
    return ",".join(found.values())


def _same_file(entry: str) -> str:
    # spark-submit turns `b.jar` into `file:///a/b.jar`; a class name stays unchanged. `local:` is a path in an image.
    url = urlsplit(entry)
    if url.scheme in ("file", "local") and not url.netloc:
        path = os.path.realpath(unquote(url.path))
    elif not url.scheme and ("/" in entry or entry.endswith(".jar")):
        path = os.path.realpath(entry)
    else:
        return entry
    # In a pod, spark-submit copies the jar into the working directory. Spark refuses two jars with one name. The name
    # contains both versions, so copies have the same content.
    name = Path(path).name
    return name if name.startswith("stagecrew-spark-") else path
