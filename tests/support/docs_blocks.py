"""Runs the Python blocks of documentation pages, and the examples: `python -P docs_blocks.py FILE ...`.

The blocks of a page run in order in one namespace, as `__main__`. A comment before a block can change that: `<!--
raises: NAME -->` means that the block must raise this error, `<!-- norun: REASON -->` that it does not run. Pages find
a session `spark` and its `crew`, which they share. A page that stops the session starts without one. The script prints
one JSON line per file, with the file's name and its failure or null.
"""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import sys
import traceback
from pathlib import Path

#: Arguments with which an example does less work.
SHORTER = {"service.py": ["10"]}

_BLOCK = re.compile(r"^(?:<!-- (raises|norun): ([^\n]+) -->\n)?```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its code, its first line, and the comment before it."""

    code: str
    line: int
    raises: str | None
    norun: str | None


def blocks(text: str) -> list[Block]:
    """Returns the Python blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(text):
        markers = {match[1]: match[2]} if match[1] else {}
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(match[3], line, markers.get("raises"), markers.get("norun")))
    return found


def run_page(path: Path, names: dict[str, object]) -> None:
    """Runs all blocks of a page. An error of a block is raised with the page's lines in the traceback."""
    namespace: dict[str, object] = {"__name__": "__main__", **names}
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.norun is not None:
            continue
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True)
        try:
            exec(code, namespace)
        except Exception as error:
            if block.raises is None or block.raises not in [one.__name__ for one in type(error).__mro__]:
                raise
        else:
            if block.raises is not None:
                raise AssertionError(f"{path}:{block.line}: the block did not raise {block.raises}")


def _session() -> dict[str, object]:
    from pyspark.sql import SparkSession

    import stagecrew

    builder = SparkSession.builder.master("local[2]").appName("docs")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
    }.items():
        builder = builder.config(key, value)
    spark = stagecrew.configure(builder).getOrCreate()
    return {"spark": spark, "crew": stagecrew.crew(spark)}


def main(files: list[str]) -> None:
    """Runs each file and prints its outcome."""
    from pyspark.sql import SparkSession

    for name in files:
        path = Path(name)
        problem = None
        try:
            if path.suffix == ".py":
                _stop()
                sys.argv = [name, *SHORTER.get(path.name, ())]
                runpy.run_path(name, run_name="__main__")
                if SparkSession.getActiveSession() is not None:
                    raise AssertionError("an example must stop its session")
            elif any("spark.stop()" in block.code for block in blocks(path.read_text(encoding="utf-8"))):
                _stop()
                run_page(path, {})
                _stop()
            else:
                run_page(path, _session())
        except BaseException:
            problem = traceback.format_exc()
        print("\n" + json.dumps({"file": name, "problem": problem}), flush=True)
    _stop()


def _stop() -> None:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
