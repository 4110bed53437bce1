"""Adds compiled modules to the pyspark.zip of the tests' SPARK_HOME.

Python caches no bytecode for modules that it imports from a zip. So the Python daemon of each test session would
compile PySpark again, which takes most of a short session's time. `make` runs this script. The sources in the zip stay
unchanged.
"""

import importlib.util
import io
import marshal
import os
import zipfile

from support.spark_home import HOME, PYSPARK_ZIP, installed_pyspark, spark_home


def main() -> None:
    """Rewrites the zip, unless it already contains compiled modules."""
    spark_home()
    path, source = HOME / PYSPARK_ZIP, installed_pyspark() / PYSPARK_ZIP
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith(".pyc") for name in archive.namelist()):
            return
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in entries:
            archive.writestr(entry, data)
            if entry.filename.endswith(".py") and "/tests/" not in entry.filename:
                code = compile(data, f"{path}/{entry.filename}", "exec", dont_inherit=True)
                # The header contains the hash of the source instead of its time, because times in a zip are local. The
                # flags (1) tell Python not to check the hash.
                head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(data)
                compiled = zipfile.ZipInfo(entry.filename + "c", entry.date_time)
                compiled.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(compiled, head + marshal.dumps(code))
    new = path.with_suffix(".new")
    new.write_bytes(out.getvalue())
    os.utime(new, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))  # spark_home() compares them
    new.replace(path)


if __name__ == "__main__":
    main()
