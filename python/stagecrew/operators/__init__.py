"""Ready-made operators: splits, commits, supersteps and event-time alignment, with their coordinators and task sides.

The methods of a topology create these operators. This package exports the objects that users pass to these methods, or
get from them. Sinks are in `stagecrew.operators.sinks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew.lazy import lazy_names

if TYPE_CHECKING:
    from stagecrew.operators.alignment import Aligner, Alignment
    from stagecrew.operators.commit_log import CommitLog, FileCommitLog, MemoryCommitLog
    from stagecrew.operators.committer import CommitReport, Committer, Staging
    from stagecrew.operators.enumerators import (
        DataSourcePartitions,
        Enumerator,
        EventTimeSplits,
        Files,
        KeyRanges,
        ParquetRowGroups,
    )
    from stagecrew.operators.sinks import read_committed
    from stagecrew.operators.superstep_context import SuperstepContext
    from stagecrew.operators.watermarks import WatermarkGroup

__all__ = [
    "Aligner",
    "Alignment",
    "CommitLog",
    "CommitReport",
    "Committer",
    "DataSourcePartitions",
    "Enumerator",
    "EventTimeSplits",
    "FileCommitLog",
    "Files",
    "KeyRanges",
    "MemoryCommitLog",
    "ParquetRowGroups",
    "Staging",
    "SuperstepContext",
    "WatermarkGroup",
    "read_committed",
]

_LAZY = {
    **dict.fromkeys(("Aligner", "Alignment"), "alignment"),
    **dict.fromkeys(("CommitLog", "FileCommitLog", "MemoryCommitLog"), "commit_log"),
    **dict.fromkeys(("CommitReport", "Committer", "Staging"), "committer"),
    **dict.fromkeys(
        ("DataSourcePartitions", "Enumerator", "EventTimeSplits", "Files", "KeyRanges", "ParquetRowGroups"),
        "enumerators",
    ),
    "SuperstepContext": "superstep_context",
    "WatermarkGroup": "watermarks",
    "read_committed": "sinks",
}

if not TYPE_CHECKING:  # a type checker knows these names, and reports others
    __getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
