"""While commits run, Spark reads the directory. It must see neither staged rows nor a partial commit."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException

from support.commit_trials import Driver, Tasks
from support.local_sinks import appended, parquet


class ReadingDriver(Driver):
    """A driver that lets a reader read at every n-th call to the file system."""

    def __init__(self, read, every_nth):
        super().__init__()
        self.read, self.every_nth, self.counts_read = read, every_nth, []

    def moment(self, name, holds=False):
        super().moment(name, holds)
        if self.moments % self.every_nth == 0:
            self.counts_read.append(self.read())


@pytest.mark.parametrize("every_nth", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("make_trial", [appended, parquet], ids=lambda make_trial: make_trial.__name__)
def test_spark_reads_all_rows_of_a_commit_or_none(sessions, tmp_path, make_trial, every_nth):
    """Spark sees all rows of a commit or none, whether it discovers partitions or reads recursively."""
    spark, trial = sessions.get("local[2,4]"), make_trial(tmp_path)
    path = trial.make_sink()._path

    def read():
        found = set()
        for recursive in ("false", "true"):
            try:
                found.add(spark.read.option("recursiveFileLookup", recursive).parquet(path).count())
            except AnalysisException as error:
                if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                    raise
                found.add(0)
        return found

    for rows_before in (0, 40) if make_trial is appended else (0,):
        driver = ReadingDriver(read, every_nth)
        trial.drive(driver, Tasks(1), f"c {rows_before}")
        assert {rows_before} in driver.counts_read
        assert len(driver.counts_read) > 3
        numbers = [number for counts in driver.counts_read for number in sorted(counts)]
        assert numbers == sorted(numbers)
        assert set(numbers) <= {rows_before, rows_before + 40}
        assert read() == {rows_before + 40}
    assert trial.leftovers() == []
