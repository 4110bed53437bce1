"""Python's view of stored partitions, without Spark."""

from __future__ import annotations

import types

import pytest

from stagecrew import PartitionReport, Release
from stagecrew.errors import ConfigurationError, TopologyError
from stagecrew.partitions.report import java_dataset, policy


@pytest.mark.parametrize("release", list(Release))
def test_a_policy_as_object_or_name(release):
    """A policy can be given as an object or by its name."""
    assert policy(release) is policy(release.value) is release


@pytest.mark.parametrize("release", ["", "ALL", "shuffle", None, 3])
def test_invalid_policies_are_refused(release):
    """By what it is, and what would be one."""
    with pytest.raises(
        ConfigurationError, match=r"release=.* is not a release policy; use one of 'shuffles', 'all', 'none'"
    ):
        policy(release)


def test_datasets_are_identified_by_their_jvm_objects():
    """A DataFrame by its `_jdf`, an RDD by its `_jrdd`, and nothing else."""
    assert java_dataset(types.SimpleNamespace(_jdf="frame")) == "frame"
    assert java_dataset(types.SimpleNamespace(_jrdd="rdd")) == "rdd"
    with pytest.raises(TopologyError, match="DataFrames and RDDs, not list"):
        java_dataset([])


def test_a_report_has_the_numbers_of_the_driver():
    """Each number is the driver's."""
    response = {
        "inProgress": 1, "outputs": 2, "outputBytes": 3, "blocks": 4, "blockBytes": 5, "released": 6, "releasedBytes": 7,
    }  # fmt: skip
    # from an older driver
    assert PartitionReport._from_json("t", "1", response) == PartitionReport("t", "1", 1, 2, 3, 4, 5, 6, 7, 0)
    assert PartitionReport._from_json("t", "1", {**response, "releaseFailures": 8}) == PartitionReport(
        "t", "1", 1, 2, 3, 4, 5, 6, 7, 8
    )
