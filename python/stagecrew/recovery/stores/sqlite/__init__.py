"""The store on SQLite, for the processes of one host."""

from stagecrew.recovery.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
