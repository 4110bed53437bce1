"""Mount points: whether a folder is on a file system that several machines may share.

File locks work on one host only.
"""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["filesystem", "mounted", "shared"]

MOUNTS: Final = "/proc/self/mountinfo"

#: File systems that several machines may mount, by their Linux names. A FUSE file system has the name that its program
#: chose.
_SHARED: Final = re.compile(
    r"nfs\d*|cifs|smb\w*|ncpfs|afs|auristorfs|coda|ceph|lustre|gpfs|beegfs|orangefs|pvfs2|glusterfs|panfs|wekafs|gfs2?"
    r"|ocfs2|9p|virtiofs|vboxsf|vmhgfs|prl_fs|fuse(\..+)?"
)
#: FUSE file systems that are on local disks.
_LOCAL: Final = frozenset({"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.lxcfs"})


def filesystem(folder: str, mounts: str = MOUNTS) -> str | None:
    """Returns the name of the file system that a folder is on, or None if the system does not report it."""
    real = os.path.realpath(folder)
    longest, found = -1, None
    for point, name in mounted(mounts):
        # A later mount hides an earlier one at the same point.
        if len(point) >= longest and (real == point or real.startswith(point.rstrip("/") + "/")):
            longest, found = len(point), name
    return found


def mounted(mounts: str = MOUNTS) -> list[tuple[str, str]]:
    """Returns the mount points of this process's namespace, in their order, each with its file system.

    The list includes folders that are bind-mounted on their own disk, which `os.path.ismount` does not detect. It is
    empty if the system does not report its mount points.
    """
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:  # noqa: PTH123
            entries = [line.split() for line in lines]
    except OSError:
        return []
    return [
        (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]), fields[fields.index("-", 6) + 1])
        for fields in entries
    ]


def shared(name: str | None) -> bool:
    """Returns whether several machines may share a file system with this name."""
    return name is not None and name not in _LOCAL and bool(_SHARED.fullmatch(name))
