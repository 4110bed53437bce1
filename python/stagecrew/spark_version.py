"""The versions of Spark that stagecrew supports, and what differs between their Python code.

This module does not import PySpark, so that the `stagecrew` command starts quickly.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagecrew.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = [
    "NEWEST_JAVA",
    "NEWEST_PYTHON",
    "SPARK_LINES",
    "arrow_schema",
    "installed_spark",
    "line_of",
    "require_supported",
    "spark_schema",
    "supported",
]

#: The supported versions of Spark, as major.minor.
SPARK_LINES: Final = ("4.0", "4.1", "4.2", "4.3")

#: The newest Java that these versions of Spark support. In Java 25, their Arrow functions fail. Spark 4.2 and later
#: pass Java the option that Arrow needs: `--sun-misc-unsafe-memory-access` (`JavaModuleOptions.java`).
NEWEST_JAVA: Final = {"4.0": 21, "4.1": 21}

#: The newest Python that these versions of Spark support, if stagecrew supports a newer one.
NEWEST_PYTHON: Final = {"4.0": (3, 13)}


def line_of(version: str) -> str:
    """Returns major.minor of a version of Spark.

    >>> line_of("4.2.1"), line_of("4.3.0.dev1"), line_of("4.2")
    ('4.2', '4.3', '4.2')
    """
    return ".".join(version.split(".")[:2])


def supported() -> str:
    """Returns the supported versions for messages."""
    return f"{SPARK_LINES[0]} to {SPARK_LINES[-1]}"


def installed_spark() -> str | None:
    """Returns the version of the Spark that this process runs or would start: of SPARK_HOME, or of PySpark.

    Returns None if Spark is not installed, or if its version cannot be found.
    """
    if home := os.environ.get("SPARK_HOME"):
        for jar in Path(home, "jars").glob("spark-core_*.jar"):
            return jar.stem.partition("-")[2].partition("-")[2]
    if "pyspark" in sys.modules:
        return str(sys.modules["pyspark"].__version__)
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    loader: Any = spec.loader  # of a folder, or of a zip file as on YARN
    try:
        text = loader.get_data(str(Path(spec.origin).with_name("version.py"))).decode()
    except (AttributeError, OSError):
        return None
    found = re.search(r"__version__.*?[\"'](.+?)[\"']", text)
    return None if found is None else found[1]


def require_supported(version: str) -> None:
    """Raises `ConfigurationError` if stagecrew does not support this version of Spark."""
    if line_of(version) not in SPARK_LINES:
        raise ConfigurationError(
            f"stagecrew supports Spark {supported()}, and this is Spark {version}: "
            f"`pip install 'pyspark~={SPARK_LINES[-1]}.0'`, and unset SPARK_HOME if it names another Spark"
        )


@functools.cache
def _takes_time_zone() -> bool:
    import inspect

    from pyspark.sql.pandas.types import to_arrow_schema

    return "timezone" in inspect.signature(to_arrow_schema).parameters


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema of a schema of Spark. Timestamps with a time zone are in UTC.

    Before 4.2, `to_arrow_schema` has no `timezone`, and always uses UTC.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    if _takes_time_zone():
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def spark_schema(schema: pa.Schema) -> StructType:
    """Returns the schema of Spark for an Arrow schema. A timestamp without a time zone becomes a TimestampNTZType.

    Before 4.2, `from_arrow_schema` has another default.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)
