"""Mount points: whether a folder is on a file system that several machines may share.

File locks work on one host only.
"""

from __future__ import annotations

import os
import re
from typing import Final

from stagecrew.operating_system import mount_points

__all__ = ["filesystem", "shared"]

#: File systems that several machines may mount, by their Linux names. A FUSE file system has the name that its program
#: chose.
_SHARED: Final = re.compile(
    r"nfs\d*|cifs|smb\w*|ncpfs|afs|auristorfs|coda|ceph|lustre|gpfs|beegfs|orangefs|pvfs2|glusterfs|panfs|wekafs|gfs2?"
    r"|ocfs2|9p|virtiofs|vboxsf|vmhgfs|prl_fs|fuse(\..+)?"
)
#: FUSE file systems that are on local disks.
_LOCAL: Final = frozenset({"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.lxcfs"})


def filesystem(folder: str) -> str | None:
    """Returns the name of the file system that a folder is on, or None if the system does not report it."""
    real = os.path.realpath(folder)
    longest, found = -1, None
    for point, name in mount_points() or ():
        # A later mount hides an earlier one at the same point.
        if len(point) >= longest and (real == point or real.startswith(point.rstrip("/") + "/")):
            longest, found = len(point), name
    return found


def shared(name: str | None) -> bool:
    """Returns whether several machines may share a file system with this name."""
    return name is not None and name not in _LOCAL and bool(_SHARED.fullmatch(name))
