"""An Iceberg table: files are staged in the table's own folder, and added by one snapshot that carries the commit's id."""

from __future__ import annotations

import contextlib
import copy
import posixpath
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.errors import CommitConflict, CommitFailed
from stagecrew.files import address, file_system, list_files, quoted
from stagecrew.operators.commit_records import file_of
from stagecrew.operators.sinks.staged import differing, keep_only, open_folder, write_part

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from stagecrew.operators.committer import Message, Staging

__all__ = ["IcebergSink"]

#: The property of a snapshot that says which commit it is.
_PROPERTY: Final = "stagecrew.commit-id"
#: The property of the same snapshot that holds the mark.
_MARK: Final = "stagecrew.commit-mark"
#: That of one without files that says which run will never be committed.
_REFUSED: Final = "stagecrew.refused-run"
#: The properties of a catalogue that say which one it is.
_WHERE: Final = ("type", "uri", "warehouse", "glue.id", "glue.region", "glue.endpoint", "client.region")


class IcebergSink:
    """Rows of an Iceberg table that exists, through pyiceberg (`stagecrew[iceberg]`).

    Readers see all rows of a commit or none: one snapshot adds its files, with the commit's id in its properties. Two commits at once
    both land. A commit is known as long as its snapshot is, or the table shows files of it. One that the table refuses leaves a snapshot
    without files, behind which no other driver can add them.

    Not promised: a repeat knows a commit whose snapshot has expired and whose files were rewritten since: do not expire snapshots of
    commits that may be repeated. A driver that is killed, or loses its catalogue, before the catalogue's update leaves what pyiceberg
    wrote for it in the table's `metadata` folder: a manifest, a manifest list, perhaps a `metadata.json`, which nothing names. Readers
    never see them, a repeat writes its own, and what removes orphan files of Iceberg tables removes them.

    `identifier` is the table's, `catalog` its catalogue's name, and `properties` how to reach it, as in `pyiceberg.catalog.
    load_catalog`; they are pickled to no task. `options` are those of `pyarrow.parquet.ParquetWriter`.
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
        """See `Committer`."""
        from pyiceberg.utils.config import Config

        known = {**(Config().get_catalog_config(self._catalog) or {}), **self._properties}
        where = (f"{name}={address(str(known[name]))}" for name in _WHERE if known.get(name))
        return f"{self!r} in {' '.join([self._catalog, *where])}"

    def in_tasks(self) -> IcebergSink:
        """See `Committer`. Tasks write files, and need no catalogue."""
        sent = copy.copy(self)
        sent._properties = {}
        return sent

    def begin(self, staging: Staging) -> None:
        """See `Committer`."""
        with self._table() as table:
            what = f"table {self._identifier}"
            if (error := differing(staging.schema, table.schema().as_arrow(), what, required=True)) is not None:
                raise error
            if table.spec().fields:
                raise CommitFailed(
                    f"table {self._identifier} is partitioned, and files are added to unpartitioned tables only: Spark's own writer "
                    f"for Iceberg knows where rows belong"
                )
        location = self._location(staging)
        try:
            filesystem, path = file_system(location, None)
            open_folder(filesystem, path, staging)
        except (OSError, RuntimeError, pa.ArrowInvalid) as error:  # the last of what is no URI: one with a space
            raise CommitFailed(f"{location} cannot be written: {error}") from error

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer`."""
        filesystem, path = file_system(self._location(staging), None)
        return write_part(filesystem, path, partition, attempt, batches, staging.schema, self._options)

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer`."""
        from pyiceberg.exceptions import CommitFailedException

        location = self._location(staging)
        files = [f"{location}/{file_of(staging.commit_id, message)}" for message in messages]
        for number in range(1, _TRIES + 1):
            try:
                with self._table() as table:
                    self._add(table, staging, files)
                return
            except CommitFailedException:
                if number == _TRIES:
                    raise  # who changes the table again and again is no reason to give it up

    def _add(self, table: Table, staging: Staging, files: list[str]) -> None:
        if _snapshot(table, _PROPERTY, staging.commit_id):
            return
        if _snapshot(table, _REFUSED, staging.run):
            raise CommitConflict(f"table {self._identifier} did not take the rows, as another driver found")
        # pyiceberg would try again by itself, behind whatever another driver has added meanwhile: this commit too.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        transaction = table.transaction()
        try:
            transaction.add_files(files, snapshot_properties={_PROPERTY: staging.commit_id, _MARK: staging.mark})
        except ValueError as error:
            if _shown(table, files):
                return  # by this commit, whose snapshot has expired
            if not _misfit(table, files):
                raise
            _refuse(table, staging)
            raise CommitConflict(f"table {self._identifier} does not take the rows: {error}") from error
        transaction.commit_transaction()  # a catalogue whose answer is no answer raises a ValueError too: nobody knows then

    def done(self, commit_id: str) -> bool:
        """See `Committer`."""
        with self._table() as table:
            return _snapshot(table, _PROPERTY, commit_id) is not None

    def stored_mark(self, commit_id: str) -> str | None:
        """See `Committer`. None of a commit whose snapshot has expired."""
        with self._table() as table:
            found = _snapshot(table, _PROPERTY, commit_id)
            return None if found is None else found.get(_MARK)

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer`. What the table shows stays in any case, also where its snapshot has expired and nobody knows of the commit."""
        location = self._location(staging)
        filesystem, path = file_system(location, None)
        stay: Sequence[str] = [file_of(staging.commit_id, message) for message in kept]
        if not stay and (names := [posixpath.basename(file) for file in list_files(filesystem, path)]):
            with self._table() as table:
                shown = _shown(table, [f"{location}/{name}" for name in names])
            stay = [posixpath.basename(file) for file in shown]
        keep_only(filesystem, path, stay)

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
                    f"table {self._identifier} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
            yield table


#: How often a commit is tried that others came before.
_TRIES: Final = 20


def _snapshot(table: Table, name: str, value: str) -> dict[str, str] | None:
    """The properties of the snapshot of which one has this value; None when there is no such snapshot."""
    summaries = (snapshot.summary for snapshot in table.snapshots())
    known = (summary.additional_properties for summary in summaries if summary is not None)
    return next((properties for properties in known if properties.get(name) == value), None)


def _shown(table: Table, files: Sequence[str]) -> set[str]:
    """Those of these files that readers of the table see."""
    if (snapshot := table.current_snapshot()) is None:
        return set()
    entries = (entry for manifest in snapshot.manifests(table.io) for entry in manifest.fetch_manifest_entry(table.io))
    return set(files).intersection(entry.data_file.file_path for entry in entries)


def _misfit(table: Table, files: Sequence[str]) -> bool:
    """Whether it is a file that the table, as it is, does not take. Nothing but the files is asked."""
    from pyiceberg.io.pyarrow import parquet_files_to_data_files

    try:
        list(parquet_files_to_data_files(table.io, table.metadata, iter(files)))
    except ValueError as error:
        return type(error) is ValueError  # and none of those that say that something could not be read
    return False


def _refuse(table: Table, staging: Staging) -> None:
    """Another driver may be about to add the same files, which will be deleted: behind this snapshot the catalogue refuses its own."""
    with (
        table.transaction() as transaction,
        transaction.update_snapshot(snapshot_properties={_REFUSED: staging.run}).fast_append(),
    ):
        pass
