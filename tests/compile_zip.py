"""Adds compiled modules to the pyspark.zip of the tests' SPARK_HOME.

Python caches no bytecode for modules that it imports from a zip, so each Python daemon of each test session would
compile PySpark again. In a short session that is most of its work. `make` runs this script. Spark finds the same
sources in the zip as before.
"""

import importlib.util
import io
import marshal
import os
import zipfile

from support.spark_home import HOME, PYSPARK_ZIP, installed_pyspark, spark_home


def main() -> None:
    """Writes the archive, unless it already has compiled modules."""
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
                # The header has the hash of the source, and Python does not check it: times in a zip are in local time.
                head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(data)
                compiled = zipfile.ZipInfo(entry.filename + "c", entry.date_time)
                compiled.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(compiled, head + marshal.dumps(code))
    new = path.with_suffix(".new")
    new.write_bytes(out.getvalue())
    os.utime(new, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))  # by this, spark_home() knows the source
    new.replace(path)


if __name__ == "__main__":
    main()
