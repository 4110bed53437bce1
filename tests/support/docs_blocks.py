"""Runs the Python blocks of documentation pages, and the example scripts: `python -P docs_blocks.py FILE ...`.

If FILE is `docstrings`, it runs the examples that need Spark from the docstrings of public names, each in a namespace
of its own.

The blocks of a page run in order in one namespace, as `__main__`. After a comment `<!-- raises: NAME -->`, the block
must raise this error. `<!-- raises: NAME or NAME -->` is for a block whose error depends on the version of Spark. After
`<!-- norun: REASON -->`, the block does not run. `<!-- test: PATH::NAME -->` names another test that runs the block, and
`<!-- output: PATH -->` the example that prints it. All pages share a session `spark` and its `crew`, except that a page
that stops the session starts without one. The script prints one JSON line per file, with the file's name and its
traceback or null.
"""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

#: Arguments that make an example do less work.
SHORTER = {"service.py": ["10"]}

_BLOCK = re.compile(
    r"^(?:<!-- (raises|norun|test|output): ([^\n]+) -->\n)?```(python|sh|shell|console)\b[^\n]*\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its code, the line number of the code, and the comment before the block."""

    code: str
    line: int
    raises: str | None = None
    norun: str | None = None
    test: str | None = None
    output: str | None = None


def blocks(text: str, *languages: str) -> list[Block]:
    """Returns the blocks of a page in some languages (by default Python), in order."""
    found = []
    for match in _BLOCK.finditer(text):
        if match[3] in (languages or ("python",)):
            line = text.count("\n", 0, match.start(4)) + 1
            found.append(Block(match[4], line, **({match[1]: match[2]} if match[1] else {})))
    return found


def run_page(path: Path, names: dict[str, object]) -> None:
    """Runs all blocks of a page. The traceback of an error contains the page's line numbers."""
    namespace: dict[str, object] = {"__name__": "__main__", **names}
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.norun is not None:
            continue
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True)
        try:
            exec(code, namespace)
        except Exception as error:
            expected = set() if block.raises is None else set(block.raises.split(" or "))
            if expected.isdisjoint(one.__name__ for one in type(error).__mro__):
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
    spark = stagecrew.configure(builder, coordinators={"budget": stagecrew.Coordinator}).getOrCreate()
    return {"spark": spark, "crew": stagecrew.crew(spark)}


#: What the examples in docstrings use without showing where it comes from.
PRELUDE = """
import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
from pyspark.sql import SparkSession

import stagecrew


@stagecrew.resource
def pool(context):
    yield "a connection"


def pass_on(gateway, batches):
    yield from batches


def enrich(batches):
    yield from batches


class ConnectionPool:
    def __init__(self, dsn):
        self.dsn = dsn


orders = pool()
schema = "id long"
path = tempfile.mkdtemp() + "/enriched"
load, tables = print, ["flights", "planes"]
"""
IN_SESSION = """
dataset = flights = joined = spark.range(0, 8, 1, 2)
topology = crew.topology("examples").start()
"""


def spark_examples() -> dict[str, str]:
    """Returns the examples of public names that doctest does not run (without `>>>`), because they need Spark."""
    import importlib
    import inspect
    import textwrap

    found = {}
    for module in ("stagecrew", "stagecrew.operators", "stagecrew.operators.sinks", "stagecrew.recovery"):
        public = importlib.import_module(module)
        for name in public.__all__:
            value = getattr(public, name)
            members = {f"{name}.{key}": one for key, one in vars(value).items()} if inspect.isclass(value) else {}
            for key, member in ({name: value} | members).items():
                text = inspect.cleandoc(getattr(getattr(member, "fget", member), "__doc__", None) or "")
                match = re.search(r"^Examples:\n((?:    [^\n]*\n|\n)+)", text + "\n", re.MULTILINE)
                if match and ">>>" not in match[1] and not key.rpartition(".")[2].startswith("_"):
                    found[key] = textwrap.dedent(match[1])
    return found


def run_docstrings() -> None:
    """Runs the examples of docstrings that need Spark."""
    for name, code in spark_examples().items():
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(PRELUDE, namespace)
        if "SparkSession" in code:
            _stop()
        else:
            namespace |= _session()
            exec(IN_SESSION, namespace)
        try:
            exec(compile(code, f"the example of {name}", "exec", dont_inherit=True), namespace)
            if "SparkSession" in code:
                _stop()
            else:
                namespace["crew"].close_all()
        except Exception as error:
            raise AssertionError(f"the example of {name} fails:\n{code}") from error
    _stop()


def main(files: list[str]) -> None:
    """Runs each file and prints its outcome."""
    from pyspark.sql import SparkSession

    for name in files:
        path = Path(name)
        problem = None
        try:
            if name == "docstrings":
                run_docstrings()
            elif path.suffix == ".py":
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
