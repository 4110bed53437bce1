"""Measures topologies: their exits, and the storage that their shuffles leave."""

from __future__ import annotations

import pathlib
import re
import subprocess

from measurements import Measurement, at_most, percentiles, ratio_at_least
from processes import Run, console, driver, in_turn

MEGABYTES = 50


def exits(run: Run):
    """The time from the beginning of a topology's exit to the last `close` in its workers, and to its return."""
    last, returned = [], []
    with driver() as ours:
        ours("exits", count=250)  # the JVMs are new, and have not compiled the hot code
        for _ in run.rounds():
            outcome = ours("exits", count=100)
            last.append(outcome["last_close_ms"])
            returned.append(outcome["returned_ms"])
    yield from percentiles("exit to the last close", "ms", {"stagecrew": last})
    yield from percentiles("exit to its return", "ms", {"stagecrew": returned}, (at_most(8), at_most(20)))


def partitions(run: Run, topologies: int = 100):
    """Topologies that shuffle 50 MB each: the storage that is left, and the throughput, with and without the plugin.

    Making the rows, writing and reading them are timed together, so the ratio is that of a whole job.
    """
    with driver("off") as without, driver("on") as with_plugin:
        sides = {"plain Spark": without, "stagecrew": with_plugin}
        disk, outputs, rates = ({name: [] for name in sides} for _ in range(3))
        for number in range(topologies):
            for name, side in sides.items():
                outcome = side("shuffle", megabytes=MEGABYTES)
                disk[name].append(outcome["disk"] / 1e6)
                outputs[name].append(outcome["outputs"])
            if number % 10 == 9:
                console.print(f"shuffle {number + 1}: {disk['plain Spark'][-1]:.0f} MB, {disk['stagecrew'][-1]:.0f} MB")
        # The driver that releases nothing fills the disk, so the rounds are short.
        for round_ in run.rounds(30):
            for name in in_turn(sides, round_):
                rates[name].append(MEGABYTES / sides[name]("shuffle", megabytes=MEGABYTES)["seconds"])
    for words, unit, left in (("on disk", "MB", disk), ("outputs in the tracker", "", outputs)):
        name = f"{words} after {topologies} topologies that shuffle {MEGABYTES} MB each"
        run.series[name] = left
        yield Measurement(name, unit, left["stagecrew"][-1:], "plain Spark", left["plain Spark"][-1:])
    goal = ratio_at_least(0.98)
    yield Measurement(
        "shuffle, written and read", "MB/s", rates["stagecrew"], "plain Spark", rates["plain Spark"], goal
    )
    for size, nanoseconds in _recording().items():
        yield Measurement(f"record one output in a table of {size:,}", "ns", [nanoseconds])


def _recording() -> dict[int, float]:
    """The nanoseconds to record one output, by the size of the table, from the suite that checks them."""
    suite = 'shim/testOnly org.apache.spark.stagecrew.PartitionTableSuite -- -z "takes as long"'
    sbt = pathlib.Path(__file__).resolve().parents[2] / "build" / "sbt"
    said = subprocess.run([sbt, suite], capture_output=True, text=True, check=True, timeout=900).stdout
    found = re.findall(r"([\d,]+) partitions: ([\d,]+) ns", said)
    return {int(size.replace(",", "")): float(nanos.replace(",", "")) for size, nanos in found}
