"""Puts compiled modules beside the sources in the pyspark.zip of this environment.

Python keeps no compiled modules for what it imports from a zip, so each Python daemon of each test session would compile
PySpark anew: most of what it does in a short session. Run by `make`; Spark finds the same sources there as before.
"""

import importlib.util
import io
import marshal
import os
import pathlib
import zipfile

import pyspark


def main() -> None:
    """Rewrites the archive, unless it has been already."""
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
                # By the hash of its source, which is not looked at: times in a zip have a zone of their own.
                head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(data)
                compiled = zipfile.ZipInfo(entry.filename + "c", entry.date_time)
                compiled.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(compiled, head + marshal.dumps(code))
    beside = path.with_suffix(".new")
    beside.write_bytes(out.getvalue())
    os.replace(beside, path)


if __name__ == "__main__":
    main()
