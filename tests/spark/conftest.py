"""Fixtures for the tests that run on every master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import stagecrew
    from support.sessions import Sessions


@pytest.fixture
def spark(sessions: Sessions, master: str) -> SparkSession:
    """A session on each master."""
    return sessions.get(master)


@pytest.fixture
def crew(spark: SparkSession) -> stagecrew.Crew:
    """The crew of the session."""
    import stagecrew

    return stagecrew.crew(spark)
