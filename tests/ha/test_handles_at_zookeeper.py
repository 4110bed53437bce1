"""State handles with their references in ZooKeeper."""

from __future__ import annotations

import uuid

import pytest

from support.handle_contract import *  # noqa: F403 (its tests are collected here)
from support.handle_faults import quick_folder, real_world


@pytest.fixture
def world(zookeeper):
    url = f"zookeeper://{zookeeper.hosts}/test/{uuid.uuid4().hex}?timeout=4"
    with quick_folder() as folder, real_world(folder, url) as found:
        yield found
