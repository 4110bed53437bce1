"""The store on ZooKeeper, for the processes of several hosts."""

from stagecrew.recovery.stores.zookeeper.store import ZooKeeperStore

__all__ = ["ZooKeeperStore"]
