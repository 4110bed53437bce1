"""Adds compiled modules to the pyspark.zip of this environment.

Python caches no bytecode for modules that it imports from a zip, so each Python daemon of each test session would
compile PySpark again. In a short session that is most of its work. `make` runs this script. Spark finds the same
sources in the zip as before.
"""

import importlib.util
import io
import marshal
import os
import pathlib
import zipfile

import pyspark


def main() -> None:
    """Rewrites the archive, unless it already has compiled modules."""
    path = pathlib.Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
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
    beside = path.with_suffix(".new")
    beside.write_bytes(out.getvalue())
    os.replace(beside, path)


if __name__ == "__main__":
    main()
