"""A ZooKeeper server that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[object]:
    """A real ZooKeeper server that no test kills."""
    from support.zookeeper import zookeeper

    with zookeeper() as server:
        yield server
