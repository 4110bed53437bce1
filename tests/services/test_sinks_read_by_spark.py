"""Spark reads a folder in the middle of commits: it sees nothing of what is staged, nor half of anything."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException

from support.commit_trials import Driver, Tasks
from support.local_sinks import appended, parquet


class Looking(Driver):
    """Somebody looks at every so many of its calls to the file system."""

    def __init__(self, look, every):
        super().__init__()
        self.look, self.every, self.seen = look, every, []

    def moment(self, name, holds=False):
        super().moment(name, holds)
        if self.moments % self.every == 0:
            self.seen.append(self.look())


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [appended, parquet], ids=lambda make: make.__name__)
def test_a_reader_meanwhile(sessions, tmp_path, make, every):
    """All rows of a commit, or none; whether Spark looks for partitions or into each folder."""
    spark, trial = sessions.get("local[2,4]"), make(tmp_path)
    path = trial.make_sink()._path

    def look():
        found = set()
        for recursive in ("false", "true"):
            try:
                found.add(spark.read.option("recursiveFileLookup", recursive).parquet(path).count())
            except AnalysisException as error:
                if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                    raise
                found.add(0)
        return found

    for already in (0, 40) if make is appended else (0,):
        driver = Looking(look, every)
        trial.drive(driver, Tasks(1), f"c {already}")
        assert {already} in driver.seen
        assert len(driver.seen) > 3
        numbers = [number for seen in driver.seen for number in sorted(seen)]
        assert numbers == sorted(numbers)
        assert set(numbers) <= {already, already + 40}
        assert look() == {already + 40}
    assert trial.leftovers() == []
