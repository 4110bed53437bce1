"""State handles with their references in ZooKeeper."""

from __future__ import annotations

import uuid

import pytest

from handlesteps import quick_folder, real_world
from handlesuite import *  # noqa: F403 (its tests are collected here)


@pytest.fixture
def world(zookeeper):
    url = f"zookeeper://{zookeeper.hosts}/test/{uuid.uuid4().hex}?timeout=4"
    with quick_folder() as folder, real_world(folder, url) as found:
        yield found
