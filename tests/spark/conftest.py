"""What tests on every master share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import stagecrew
    from support.sessions import Sessions


@pytest.fixture
def spark(sessions: Sessions, master: str) -> SparkSession:
    """A session on each of the masters."""
    return sessions.get(master)


@pytest.fixture
def crew(spark: SparkSession) -> stagecrew.Crew:
    """Its crew."""
    import stagecrew

    return stagecrew.crew(spark)
