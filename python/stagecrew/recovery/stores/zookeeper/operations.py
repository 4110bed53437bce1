"""Converts a store's operations to ZooKeeper's operations, and ZooKeeper's errors to the reasons of conflicts."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from stagecrew.recovery.stores.contract import Check, Create, Delete, Operation, Replace

__all__ = ["Plan", "conflict_reason", "plan_transaction"]

_HIGHEST_VERSION: Final = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transaction as it is sent to ZooKeeper."""

    steps: list[Callable[[Any], None]]
    #: The result of the transaction if it is applied: the version of each key.
    versions: list[int | None]
    #: The indexes of the checks that accept any version. They are sent with the version that was read beforehand.
    any_version_checks: set[int]

    def add_to(self, transaction: Any) -> None:
        """Adds the operations to a transaction of kazoo."""
        for step in self.steps:
            step(transaction)


def plan_transaction(
    operations: Sequence[Operation], path_of: Callable[[str], str], current_version: Callable[[str], int | None]
) -> Plan:
    """Plans a transaction. `current_version` reads the version of a key; it returns None if the key does not exist.

    ZooKeeper does not return the version that it checks. So a check that accepts any version is sent with the version
    that was read.
    """
    plan = Plan([], [], set())
    planned: dict[str, int | None] = {}
    for index, operation in enumerate(operations):
        key, path = operation.key, path_of(operation.key)
        version: int | None
        match operation:
            case Create(value=value, ephemeral=ephemeral):
                version = 0
                plan.steps.append(operator.methodcaller("create", path, value, ephemeral=ephemeral))
            case Replace(value=value, version=before):
                version = before + 1
                plan.steps.append(operator.methodcaller("set_data", path, value, before))
            case Delete(version=before):
                version = None
                plan.steps.append(operator.methodcaller("delete", path, -1 if before is None else before))
            case Check(version=before):
                version = before
                if before is None and planned.get(key) is not None:
                    version = planned[key]
                elif before is None:
                    plan.any_version_checks.add(index)
                    found = current_version(key)
                    version = _HIGHEST_VERSION if found is None else found
                plan.steps.append(operator.methodcaller("check", path, version))
        planned[key] = version
        plan.versions.append(version)
    return plan


def conflict_reason(operation: Operation, error: Exception) -> str | None:
    """Returns the reason for a `StoreConflict`, or None if ZooKeeper's error is not a conflict."""
    from kazoo import exceptions as kazoo

    match error:
        case kazoo.NodeExistsError():
            return "exists"
        case kazoo.NoNodeError():
            return "no parent" if isinstance(operation, Create) else "missing"
        case kazoo.NoChildrenForEphemeralsError():
            return "no parent"
        case kazoo.BadVersionError():
            return "version"
        case kazoo.NotEmptyError():
            return "not empty"
    return None
