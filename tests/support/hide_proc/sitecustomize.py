"""Hides from stagecrew what macOS does not have. Python imports this module if its folder is on the PYTHONPATH.

/proc does not exist for the modules of stagecrew, and `socket` has no SO_PEERCRED. Other modules still see /proc, such as
the tests. psutil reads it too. On macOS, psutil asks the kernel instead.
"""

import errno
import os
import socket
import sys


def _is_hidden(path):
    try:
        path = os.fsdecode(path)
    except TypeError:  # an open file
        return False
    return path == "/proc" or path.startswith("/proc/")


def _reads_for_stagecrew():
    """Returns whether a module of stagecrew is the first module on the stack that is not in the standard library."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in sys.stdlib_module_names:
            return package == "stagecrew"
        frame = frame.f_back
    return False


def _hide(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and _is_hidden(arguments[0]) and _reads_for_stagecrew():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(arguments[0]))


sys.addaudithook(_hide)
del socket.SO_PEERCRED
