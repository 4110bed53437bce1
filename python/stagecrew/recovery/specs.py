"""What a job is: everything that a standby needs to run it, without the disk of whoever submitted it."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import io
import json
import re
import site
import sys
import sysconfig
import zipfile
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagecrew.errors import JobUnreadable, RecoveryMisused

__all__ = ["FILES", "SCRIPT", "JobSpec"]

#: In the folder of a run: what is put on Python's path, and the script.
FILES: Final = "files"
SCRIPT: Final = "script"

_FORMAT: Final = 1
_TARGET: Final = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A function or a script, with its arguments, Spark's configuration, and the bytes of its files.

    Values of `conf` may be secrets: they lie in the state storage, and reach spark-submit by a file of its user alone.
    """

    #: `module:function`, or the name of a script among `files`.
    target: str
    #: Of a function, by name, pickled; of a script, its command line.
    arguments: bytes | tuple[str, ...] = ()
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: What is put on Python's path, on the driver and the executors, by name.
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    script: bytes | None = None
    #: How many runs may be started, before the job is given up as failed.
    max_attempts: int = 10
    #: Of a function's arguments, what they are, however they were pickled; empty where nobody has looked.
    fingerprint: str = ""

    @property
    def name(self) -> str:
        """A word for people."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.target.rpartition(":")[2] or self.target)[:60]

    def to_bytes(self) -> bytes:
        """As bytes to be stored."""
        looked = {"fingerprint": self.fingerprint} if self.fingerprint else {}
        return _json(self._body() | looked)

    @property
    def digests(self) -> tuple[str, ...]:
        """What tells two jobs apart: the same for the same content, in whatever process it was put together.

        Jobs are stored with the first. The last is by what pickle made of the arguments: jobs of earlier versions have it.
        """
        body = self._body()
        looked = [body | {"arguments": {"fingerprint": self.fingerprint}}] if self.fingerprint else []
        return tuple(hashlib.sha256(_json(one)).hexdigest() for one in [*looked, body])

    def _body(self) -> dict[str, Any]:
        arguments = (
            {"pickled": b64encode(self.arguments).decode()}
            if isinstance(self.arguments, bytes)
            else list(self.arguments)
        )
        return {
            "format": _FORMAT,
            "target": self.target,
            "arguments": arguments,
            "conf": dict(sorted(self.conf.items())),
            "files": [
                [name, hashlib.sha256(data).hexdigest(), b64encode(data).decode()]
                for name, data in sorted(self.files.items())
            ],
            "script": None if self.script is None else b64encode(self.script).decode(),
            "max_attempts": self.max_attempts,
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> JobSpec:
        """What `to_bytes` made. Raises `JobUnreadable`."""
        try:
            found = json.loads(data)
            if found["format"] != _FORMAT:
                raise JobUnreadable(
                    f"it is of format {found['format']}; this stagecrew reads {_FORMAT}: use the one that wrote it"
                )
            files = {name: b64decode(text, validate=True) for name, _, text in found["files"]}
            for name, digest, _ in found["files"]:
                if hashlib.sha256(files[name]).hexdigest() != digest:
                    raise JobUnreadable(f"the digest of its file {name} differs")
            arguments = found["arguments"]
            return cls(
                target=found["target"],
                arguments=b64decode(arguments["pickled"]) if isinstance(arguments, dict) else tuple(arguments),
                conf=found["conf"],
                files=files,
                script=None if found["script"] is None else b64decode(found["script"]),
                max_attempts=found["max_attempts"],
                fingerprint=found.get("fingerprint", ""),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobUnreadable(f"it is not as it was written: {type(error).__name__}: {error}") from error

    @classmethod
    def of_function(
        cls,
        target: str,
        arguments: Mapping[str, Any],
        conf: Mapping[str, str] | None = None,
        py_files: Iterable[str | Path] = (),
        max_attempts: int = 10,
    ) -> JobSpec:
        """A job that calls a function with these arguments by name; what it returns is the job's result.

        A module that is a file beside the caller (on `sys.path`, not installed) travels by itself; a package and what that module
        imports is named by `py_files`: `.py`, `.zip` or `.egg` files, as for spark-submit.

        Raises `RecoveryMisused` when the module has no such function, the function does not take these arguments, or an argument
        cannot be pickled. This compares source code and runs nothing: it takes any arguments for a function that is decorated, or
        that is defined otherwise than by one `def`.
        """
        match = _TARGET.fullmatch(target)
        if match is None:
            raise RecoveryMisused(f"{target!r} is no module:function; write it like etl.nightly:load")
        module, function = match.groups()
        files = _bytes_of(py_files)
        if not _is_among(module, files):
            files |= _shipped(module, function)
        try:
            from pyspark import cloudpickle

            given = dict(sorted(arguments.items()))
            pickled = bytes(cloudpickle.dumps(given))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise RecoveryMisused(
                f"the arguments of {target} cannot be pickled: {type(error).__name__}: {error}"
            ) from error
        from stagecrew.listeners.fingerprints import fingerprint

        looked = fingerprint(given, pickled).hex()
        spec = cls(target, pickled, _client(conf), files, None, _checked(max_attempts), looked)
        _check_arguments(target, _source(module, files), function, given)
        return spec

    @classmethod
    def of_script(
        cls,
        path: str | Path,
        arguments: Sequence[str] = (),
        conf: Mapping[str, str] | None = None,
        py_files: Iterable[str | Path] = (),
        max_attempts: int = 10,
    ) -> JobSpec:
        """A job that runs a script with a command line. Its result is None.

        Raises `RecoveryMisused` when the script or a file cannot be read, or is no Python.
        """
        [(name, data)] = _bytes_of([path]).items()
        try:
            compile(data, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise RecoveryMisused(f"{path} is no Python script: {error}") from error
        return cls(name, tuple(arguments), _client(conf), _bytes_of(py_files), data, _checked(max_attempts))


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _client(conf: Mapping[str, str] | None) -> dict[str, str]:
    conf = dict(conf or {})
    if conf.get("spark.submit.deployMode", "client") != "client":
        raise RecoveryMisused(
            "jobs run in Spark's client mode, on the leader's host, which follows their process: leave spark.submit.deployMode out"
        )
    return conf


def _checked(max_attempts: int) -> int:
    if max_attempts < 1:
        raise RecoveryMisused(f"a job has at least one run, not {max_attempts}")
    return max_attempts


def _bytes_of(paths: Iterable[str | Path]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in map(Path, paths):
        if path.name in files:
            raise RecoveryMisused(f"two files are named {path.name}: they would be one on the driver's path")
        try:
            files[path.name] = path.read_bytes()
        except OSError as error:
            raise RecoveryMisused(f"{path} cannot be read: {error.strerror or error}") from error
    return files


def _is_among(module: str, files: Mapping[str, bytes]) -> bool:
    """Whether one of these files has the module."""
    path = module.replace(".", "/")
    if f"{path}.py" in files:
        return True
    for name, data in files.items():
        if name.endswith((".zip", ".egg")):
            try:
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    if {f"{path}.py", f"{path}/__init__.py"} & set(archive.namelist()):
                        return True
            except zipfile.BadZipFile as error:
                raise RecoveryMisused(f"{name} is no archive that Python can read: {error}") from error
    return False


def _shipped(module: str, function: str) -> dict[str, bytes]:
    """The file of a module that nobody has installed. Raises `RecoveryMisused`."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise RecoveryMisused(
            f"no module {module!r} is here, nor in the files of the job: submit where it can be imported, or name it with --py-files"
        )
    origin = Path(found.origin)
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")] + [site.getusersitepackages()]
    if not found.has_location or any(origin.is_relative_to(folder) for folder in installed):
        return {}
    if "." in module or origin.name == "__init__.py":
        raise RecoveryMisused(
            f"module {module!r} is of a package that is not installed: a standby would not find it. Zip the package, and name it with "
            f"--py-files"
        )
    source = origin.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise RecoveryMisused(f"{origin.name} is no Python module: {error}") from error
    stars = any(isinstance(one, ast.ImportFrom) and one.names[0].name == "*" for one in ast.walk(tree))
    if not stars and function not in compile(tree, str(origin), "exec").co_names:
        raise RecoveryMisused(f"module {module!r} ({origin.name}) defines no {function!r}")
    return {origin.name: source}


def _source(module: str, files: Mapping[str, bytes]) -> bytes | None:
    """The source of a module: of the job's files, or of this environment. None when it has no Python source."""
    path = module.replace(".", "/")
    for name, data in files.items():
        if name == f"{path}.py":
            return data
        if name.endswith((".zip", ".egg")):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for member in {f"{path}.py", f"{path}/__init__.py"} & set(archive.namelist()):
                    return archive.read(member)
    found = importlib.util.find_spec(module)
    origin = None if found is None or not found.has_location or found.origin is None else Path(found.origin)
    return origin.read_bytes() if origin is not None and origin.suffix == ".py" and origin.is_file() else None


def _check_arguments(target: str, source: bytes | None, function: str, given: Mapping[str, Any]) -> None:
    """Raises `RecoveryMisused` when the source says for certain that the function cannot be called with these arguments."""
    try:
        tree = ast.parse(source or b"")
    except (SyntaxError, ValueError):
        return  # source for another Python version: the run will report it
    bound = [node for node in ast.walk(tree) if function in _names_bound(node)]
    found = bound[0] if len(bound) == 1 else None
    if not isinstance(found, ast.FunctionDef) or found not in tree.body or found.decorator_list:
        return
    takes = found.args
    by_name = [one.arg for one in (*takes.args, *takes.kwonlyargs)]
    optional = [one.arg for one in takes.args[len(takes.args) - len(takes.defaults) :]] if takes.defaults else []
    optional += [one.arg for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default]
    by_position = takes.posonlyargs[: len(takes.posonlyargs) - max(0, len(takes.defaults) - len(takes.args))]
    problems = []
    if by_position:
        problems.append(f"takes {by_position[0].arg} by position alone")
    if missing := [name for name in by_name if name not in given and name not in optional]:
        problems.append(f"is called without {', '.join(missing)}")
    if unknown := [name for name in given if name not in by_name and takes.kwarg is None]:
        problems.append(f"does not take {', '.join(unknown)}")
    if problems:
        raise RecoveryMisused(
            f"{target} {' and '.join(problems)}: it takes {', '.join(by_name) or 'no arguments by name'}, given by name "
            f"(--arg name=text)"
        )


def _names_bound(node: ast.AST) -> Iterable[str]:
    """The names that a node of a source may bind."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return (node.id,)
    if isinstance(node, ast.alias):
        return ((node.asname or node.name).partition(".")[0],)
    return ()


def on_path(folder: Path) -> None:
    """Puts the files of a job that lie in a folder on Python's path."""
    for path in [folder, *sorted(folder.glob("*.zip")), *sorted(folder.glob("*.egg"))]:
        sys.path.insert(0, str(path))
