"""The sink for an Iceberg table. Tasks stage files in the table's folder. One snapshot adds them with the commit id."""

from __future__ import annotations

import contextlib
import copy
import posixpath
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.errors import CommitConflict, CommitFailed
from stagecrew.files import address, file_system, list_files, quoted
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.commit_records import file_of
from stagecrew.operators.sinks.staged import differing, keep_only, open_folder, write_part

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from stagecrew.operators.committer import Message, Staging

__all__ = ["IcebergSink"]

#: The snapshot property that contains the commit's id.
_PROPERTY: Final = "stagecrew.commit-id"
#: The property of the same snapshot that contains the mark.
_MARK: Final = "stagecrew.commit-mark"
#: The property of a snapshot without files. It names a run that will never be committed.
_REFUSED: Final = "stagecrew.refused-run"
#: The properties that identify a catalogue.
_WHERE: Final = ("type", "uri", "warehouse", "glue.id", "glue.region", "glue.endpoint", "client.region")


class IcebergSink:
    """An existing Iceberg table, through pyiceberg (`stagecrew[iceberg]`). Readers see all rows of a commit or none.

    One snapshot adds the files of a commit, with the commit's id in its properties. Two concurrent commits both
    succeed. A repeat recognizes a commit while its snapshot exists, or while the table contains files of the commit. If
    the table refuses the files, the sink adds a snapshot without files. After that, no other driver can add the files.

    Args:
        identifier: The identifier of the table, such as `db.flights`.
        catalog: The name of the table's catalogue.
        properties: The properties of the catalogue, as in `pyiceberg.catalog.load_catalog`. They are not pickled to
            tasks.
        options: Options of `pyarrow.parquet.ParquetWriter`, such as `compression`.

    Examples:
        >>> IcebergSink("db.flights", catalog="prod")
        <Iceberg table db.flights>
        >>> topology.commit(dataset, IcebergSink("db.flights"))  # doctest: +SKIP

    Not promised: that a repeat recognizes a commit whose snapshot has expired and whose files were rewritten. Do not
    expire snapshots of commits that may be repeated. Also not promised: that nothing is left in the table's `metadata`
    folder. A driver that is killed, or loses its catalogue, before the catalogue's update leaves a manifest, a manifest
    list and perhaps a `metadata.json`. Nothing refers to them, readers never see them, and Iceberg's removal of orphan
    files deletes them.

    Source: Flink's two-phase sinks (FLIP-143).
    """

    def __init__(
        self, identifier: str, catalog: str = "default", properties: dict[str, str] | None = None, **options: Any
    ) -> None:
        self._identifier, self._catalog, self._options = identifier, catalog, options
        self._properties = dict(properties or {})
        self._folder: str | None = None

    def __repr__(self) -> str:
        return f"<Iceberg table {self._identifier}>"

    @property
    def identity(self) -> str:
        """The table and its catalogue, without secrets."""
        from pyiceberg.utils.config import Config

        known = {**(Config().get_catalog_config(self._catalog) or {}), **self._properties}
        where = (f"{name}={address(str(known[name]))}" for name in _WHERE if known.get(name))
        return f"{self!r} in {' '.join([self._catalog, *where])}"

    def in_tasks(self) -> IcebergSink:
        """Returns a copy without the catalogue's properties: tasks only write files. See `Committer`."""
        sent = copy.copy(self)
        sent._properties = {}
        return sent

    def begin(self, staging: Staging) -> None:
        """See `Committer.begin`."""
        with self._table() as table:
            name = f"table {self._identifier}"
            if (error := differing(staging.schema, table.schema().as_arrow(), name, required=True)) is not None:
                raise error
            if table.spec().fields:
                raise CommitFailed(
                    f"table {self._identifier} is partitioned. This sink writes to unpartitioned tables only: "
                    "Spark's own writer for Iceberg partitions rows"
                )
        location = self._location(staging)
        try:
            filesystem, path = file_system(location, None)
            open_folder(filesystem, path, staging)
        # pyarrow raises ArrowInvalid for a path that is not a URI, such as a path with a space.
        except (OSError, RuntimeError, pa.ArrowInvalid) as error:
            raise CommitFailed(
                f"{location} cannot be written: {error}. Check the table's location and its permissions"
            ) from error

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer.stage`."""
        filesystem, path = file_system(self._location(staging), None)
        return write_part(filesystem, path, partition, attempt, batches, staging.schema, self._options)

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer.commit`."""
        from pyiceberg.exceptions import CommitFailedException
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

        location = self._location(staging)
        files = [f"{location}/{file_of(staging.commit_id, message)}" for message in messages]
        # If even the last try fails, the table changes all the time. This is not a conflict: the commit stays decided.
        retrying = Retrying(
            retry=retry_if_exception_type(CommitFailedException), stop=stop_after_attempt(_TRIES), reraise=True
        )
        retrying(self._add_to_table, staging, files)

    def _add_to_table(self, staging: Staging, files: list[str]) -> None:
        with self._table() as table:
            self._add(table, staging, files)

    def _add(self, table: Table, staging: Staging, files: list[str]) -> None:
        if _snapshot(table, _PROPERTY, staging.commit_id):
            return
        if _snapshot(table, _REFUSED, staging.run):
            raise CommitConflict(
                f"table {self._identifier} refused the rows when another driver committed them. Fix the rows or "
                "the table, and commit again"
            )
        # pyiceberg's own retry would not notice if another driver has already added this commit.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        transaction = table.transaction()
        try:
            transaction.add_files(files, snapshot_properties={_PROPERTY: staging.commit_id, _MARK: staging.mark})
        except ValueError as error:
            if _visible_files(table, files):
                return  # this commit added them, and its snapshot has expired
            if _do_files_fit(table, files):
                raise
            _refuse(table, staging)
            raise CommitConflict(
                f"table {self._identifier} refuses the rows: {error}. Fix the rows or the table, and commit again"
            ) from error
        # This call is outside of the handler above, because an invalid reply from the catalogue is also a ValueError,
        # but leaves the outcome unknown.
        transaction.commit_transaction()

    def done(self, commit_id: str) -> bool:
        """See `Committer.done`."""
        with self._table() as table:
            return _snapshot(table, _PROPERTY, commit_id) is not None

    def stored_mark(self, commit_id: str) -> str | None:
        """Returns the mark of a visible commit, or None if its snapshot has expired. See `Committer`."""
        with self._table() as table:
            found = _snapshot(table, _PROPERTY, commit_id)
            return None if found is None else found.get(_MARK)

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer.discard`.

        Files that readers of the table see are never deleted, even if the snapshot has expired.
        """
        location = self._location(staging)
        filesystem, path = file_system(location, None)
        kept_names: Sequence[str] = [file_of(staging.commit_id, message) for message in kept]
        if not kept_names and (names := [posixpath.basename(file) for file in list_files(filesystem, path)]):
            with self._table() as table:
                visible = _visible_files(table, [f"{location}/{name}" for name in names])
            kept_names = [posixpath.basename(file) for file in visible]
        keep_only(filesystem, path, kept_names)

    def _location(self, staging: Staging) -> str:
        if self._folder is None:
            with self._table() as table:
                self._folder = table.location().rstrip("/")
        return f"{self._folder}/data/stagecrew-{quoted(staging.commit_id)}-{staging.run}"

    @contextlib.contextmanager
    def _table(self) -> Iterator[Table]:
        from pyiceberg.catalog import load_catalog

        with contextlib.ExitStack() as open_:
            try:
                catalog = load_catalog(self._catalog, **self._properties)
                if hasattr(catalog, "close"):
                    open_.callback(catalog.close)
                table = catalog.load_table(self._identifier)
            except Exception as error:
                raise CommitFailed(
                    f"table {self._identifier} cannot be loaded: {error_text(error)}. Check the catalogue "
                    f"{self._catalog!r}"
                ) from error
            yield table


#: How many times a commit is tried while other commits to the table succeed.
_TRIES: Final = 20


def _snapshot(table: Table, name: str, value: str) -> dict[str, str] | None:
    """The properties of the snapshot that has this property, or None."""
    summaries = (snapshot.summary for snapshot in table.snapshots())
    known = (summary.additional_properties for summary in summaries if summary is not None)
    return next((properties for properties in known if properties.get(name) == value), None)


def _visible_files(table: Table, files: Sequence[str]) -> set[str]:
    """Those of the given files that readers of the table see."""
    if (snapshot := table.current_snapshot()) is None:
        return set()
    entries = (entry for manifest in snapshot.manifests(table.io) for entry in manifest.fetch_manifest_entry(table.io))
    return set(files).intersection(entry.data_file.file_path for entry in entries)


def _do_files_fit(table: Table, files: Sequence[str]) -> bool:
    """Whether all files fit the current schema of the table. Reads only the files."""
    from pyiceberg.io.pyarrow import parquet_files_to_data_files

    try:
        list(parquet_files_to_data_files(table.io, table.metadata, iter(files)))
    except ValueError as error:
        return type(error) is not ValueError  # a subclass means that a file could not be read
    return True


def _refuse(table: Table, staging: Staging) -> None:
    """Adds a snapshot without files.

    The catalogue then refuses the snapshot of another driver that is about to add the same files.
    """
    with (
        table.transaction() as transaction,
        transaction.update_snapshot(snapshot_properties={_REFUSED: staging.run}).fast_append(),
    ):
        pass
