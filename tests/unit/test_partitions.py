"""The Python side of stored partitions, without Spark: release policies, datasets and reports."""

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
    """The error for an invalid policy lists the valid policies."""
    with pytest.raises(
        ConfigurationError, match=r"release=.* is not a release policy; use one of 'shuffles', 'all', 'none'"
    ):
        policy(release)


def test_datasets_are_identified_by_their_jvm_objects():
    """A DataFrame is identified by its `_jdf` and an RDD by its `_jrdd`. Any other object is refused."""
    assert java_dataset(types.SimpleNamespace(_jdf="frame")) == "frame"
    assert java_dataset(types.SimpleNamespace(_jrdd="rdd")) == "rdd"
    with pytest.raises(TopologyError, match="DataFrames and RDDs, not list"):
        java_dataset([])


def test_a_report_has_the_numbers_of_the_driver():
    """A report contains each number of the driver's response. A number that the response lacks is 0."""
    response = {
        "inProgress": 1, "outputs": 2, "outputBytes": 3, "blocks": 4, "blockBytes": 5, "released": 6,
        "releasedBytes": 7,
    }  # fmt: skip
    # the response lacks `releaseFailures`
    assert PartitionReport._from_json("t", "1", response) == PartitionReport("t", "1", 1, 2, 3, 4, 5, 6, 7, 0)
    assert PartitionReport._from_json("t", "1", {**response, "releaseFailures": 8}) == PartitionReport(
        "t", "1", 1, 2, 3, 4, 5, 6, 7, 8
    )
