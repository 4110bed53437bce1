"""The store on ZooKeeper, for the processes of several hosts. kazoo is its client."""

from stagecrew.recovery.stores.zookeeper.store import ZooKeeperStore

__all__ = ["ZooKeeperStore"]
