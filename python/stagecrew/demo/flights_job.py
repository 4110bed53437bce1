"""The job of the demo's last part: it loads the flights piece by piece, as a stored job, or as a plain program.

The stored job has a copy of this file, so this module imports nothing from the demo.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["PIECES", "load", "load_plainly"]

#: The maximum number of pieces.
PIECES: Final = 12


def load(flights: str, target: str) -> int:
    """Loads the flights, with a step for each piece. A later run continues after the last finished step.

    Args:
        flights: A folder of Parquet files.
        target: The path of the folder for the result.

    Returns:
        The number of rows.
    """
    import stagecrew
    from stagecrew.operators.sinks import ParquetSink

    job = stagecrew.current_job()
    spark = stagecrew.configure(SparkSession.builder.config("spark.ui.enabled", "false")).getOrCreate()
    crew = stagecrew.crew(spark)

    def commit(name: str, piece: DataFrame) -> int:
        with crew.topology(f"load {name}") as topology:
            return topology.commit(piece, ParquetSink(target, mode="append")).rows

    rows = 0
    for name, piece in _pieces(spark, flights):
        rows += job.step(name, functools.partial(commit, name, piece))
    spark.stop()
    return rows


def load_plainly(flights: str, target: str, master: str) -> None:
    """Loads the flights with `df.write`, and prints the name of each piece that is loaded."""
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    for name, piece in _pieces(spark, flights):
        piece.write.mode("append").parquet(target)
        print(name, flush=True)
    spark.stop()


def _pieces(spark: SparkSession, flights: str) -> list[tuple[str, DataFrame]]:
    files = sorted(Path(flights).glob("*.parquet"))
    groups = [files[n::PIECES] for n in range(min(PIECES, len(files)))]
    return [
        (f"piece-{n:02}", spark.read.parquet(*(file.as_uri() for file in group))) for n, group in enumerate(groups, 1)
    ]
