"""Mount points: whether a folder is on a file system that several machines may use. File locks hold on one host only."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["filesystem", "mounted", "shared"]

MOUNTS: Final = "/proc/self/mountinfo"

#: What other machines may have mounted too, as Linux names it. Of FUSE nothing is known but the name that a program gives.
_SHARED: Final = re.compile(
    r"nfs\d*|cifs|smb\w*|ncpfs|afs|auristorfs|coda|ceph|lustre|gpfs|beegfs|orangefs|pvfs2|glusterfs|panfs|wekafs|gfs2?|ocfs2"
    r"|9p|virtiofs|vboxsf|vmhgfs|prl_fs|fuse(\..+)?"
)
#: Programs of FUSE that show what is on disks of this host.
_LOCAL: Final = frozenset({"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.lxcfs"})


def filesystem(folder: str, mounts: str = MOUNTS) -> str | None:
    """The name of the file system that a folder is on; None where the system does not tell."""
    real = os.path.realpath(folder)
    best, found = -1, None
    for point, name in mounted(mounts):
        # What was mounted last hides what was mounted there before.
        if len(point) >= best and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, found = len(point), name
    return found


def mounted(mounts: str = MOUNTS) -> list[tuple[str, str]]:
    """The mount points of this process's namespace, in their order, each with its file system; none where the system does not say.

    Also those of a folder on its own disk, which `os.path.ismount` does not see.
    """
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:  # noqa: PTH123
            known = [line.split() for line in lines]
    except OSError:
        return []
    return [
        (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]), fields[fields.index("-", 6) + 1])
        for fields in known
    ]


def shared(name: str | None) -> bool:
    """Whether a file system of this name may be in use by several machines."""
    return name is not None and name not in _LOCAL and bool(_SHARED.fullmatch(name))
