"""State handles whose states are on an S3 server."""

from __future__ import annotations

import time

import pytest

from stagecrew.errors import StateCorrupt, StateStorageError
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import Reference, StateStorage
from stagecrew.recovery.state.sweep import SweepReport, sweep
from support.model_store import ModelServer
from support.s3 import s3_server


def test_states_can_be_stored_on_s3():
    """States on S3 can be written, read, verified, replaced and removed. A sweep uses the server's clock.

    No message contains the secret key.
    """
    with s3_server() as (filesystem, uri):
        storage = StateStorage(uri)
        store = ModelServer().session()
        handles = StateHandleStore(store, storage, "jobs")
        handles.add("a", b"state" * 1000)
        handles.add("b", b"b")
        assert handles.replace("a", 0, b"new") == 1
        reference = handles.get("a").reference
        assert handles.get("a").data == b"new"
        folder = reference.name.rpartition("/")[0]
        assert len(storage.names(folder)) == 2
        assert abs(storage.now(folder) - time.time()) < 10
        with filesystem.open_output_stream(f"bucket/states/{reference.name}") as stream:
            stream.write(b"old")
        with pytest.raises(StateCorrupt, match="SHA-256"):
            handles.get("a")
        storage.write("orphan", b"123", folder)
        assert sweep(store, storage, ["jobs"], 3600) == SweepReport(kept=3)
        assert sweep(store, storage, ["jobs"], 0, lambda: 1e12) == SweepReport(kept=2, removed=1, bytes=3)
        handles.remove("a")
        handles.remove("b")
        storage.discard(reference)
        assert storage.names(folder) == []
        assert storage.names("never") == []
        with pytest.raises(StateStorageError, match="missing"):
            storage.read(Reference("missing", 1, ""))
        nowhere = StateStorage(uri.replace("@bucket", "@nowhere"))
        with pytest.raises(StateStorageError, match="nowhere") as caught:
            nowhere.write("a", b"1")
        assert "very-secret" not in f"{caught.value} {nowhere!r} {storage!r}"
