"""The keys of jobs in the store.

For each job, `jobs/<id>` is the record, which stays until the job is pruned. Below it are `claim` (its version fences
the job's runs), `process` (ephemeral; exists while a process runs the job), `cancel` (exists if a cancellation was
requested), `steps` and `commits`. The handles `specs/<id>` and `results/<id>` refer to the job's specification and its
result.

Two indexes keep processes from reading all jobs that ever ran:

* `open/<id>` exists if and only if the job exists and is not clean. A leader reads only these jobs.
* `ended/<hour>/<token>-<id>` exists if and only if the job is clean. The hour (in UTC) is when the job ended. The token
  is new for each job, even if it reuses the id of a pruned job, so a prune that was paused cannot remove the later job.

Each index entry is created and deleted in the transaction that makes it true or false.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

from stagecrew.recovery.stores.contract import encode_segment

__all__ = ["ROOTS", "ended_key", "hour_of", "job_key", "open_key", "unique_value"]

#: The top-level entries of jobs.
ROOTS: Final = ("jobs", "specs", "results", "open", "ended")


def job_key(job: str) -> str:
    """Returns the key of a job's record."""
    return f"jobs/{encode_segment(job)}"


def open_key(job: str) -> str:
    """Returns the key of a job in the index of open jobs."""
    return f"open/{encode_segment(job)}"


def ended_key(job: str, ended: float) -> str:
    """Returns a new key for a job in the index of ended jobs. Each call returns another key."""
    return f"ended/{hour_of(ended)}/{uuid.uuid4().hex[:12]}-{encode_segment(job)}"


def hour_of(seconds: float) -> str:
    """Returns the hour in UTC, as one segment of a key. Later hours sort after earlier hours.

    >>> hour_of(1_800_000_000.0)
    '2027-01-15T08'
    """
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H")


def unique_value(fields: Mapping[str, Any]) -> bytes:
    """Encodes these fields as a value that differs from all other values."""
    return json.dumps({**fields, "write": uuid.uuid4().hex}).encode()
