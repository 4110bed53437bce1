"""The specification of a job: everything that another host needs to run it, without files of the submitter's host."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagecrew.errors import ConfigurationError, RecordUnreadable
from stagecrew.observability.error_summary import error_text
from stagecrew.recovery.jobs.modules import check_arguments, is_in_files, module_file, read_source

__all__ = ["JobSpec"]

_FORMAT: Final = 1
_TARGET: Final = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
_DEFAULT_ATTEMPTS: Final = 10


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A function or a script with its arguments, Spark configuration, and the bytes of its files.

    Create it with `of_function` or `of_script`. The values of `conf` can be secrets: they are stored in the state
    storage, and spark-submit reads them from a file that only its user can read.

    Attributes:
        target: `module:function`, or the file name of a script.
        arguments: The pickled arguments of a function, by name, or the command line of a script.
        conf: The Spark configuration.
        files: The files for Python's path on the driver and the executors, by name.
        script: The bytes of the script; None for a function.
        max_attempts: The maximum number of runs. If all of them are lost, the job fails.
        fingerprint: Identifies a function's arguments, independently of their pickled bytes. Empty if it was not
            computed.

    Examples:
        >>> from stagecrew.recovery import JobSpec
        >>> spec = JobSpec.of_function("textwrap:dedent", {"text": "  hello"}, max_attempts=3)
        >>> spec.target, spec.name, spec.max_attempts
        ('textwrap:dedent', 'dedent', 3)
    """

    target: str
    arguments: bytes | tuple[str, ...] = ()
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    script: bytes | None = None
    max_attempts: int = _DEFAULT_ATTEMPTS
    fingerprint: str = ""

    @property
    def name(self) -> str:
        """A short name for display: the function or the script."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.target.rpartition(":")[2] or self.target)[:60]

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that identify the content of the job. Every process computes the same digests.

        New records store the first digest. The last one depends on the pickled bytes of the arguments, and is the one
        that earlier versions stored.
        """
        body = self._body()
        identified = [body | {"arguments": {"fingerprint": self.fingerprint}}] if self.fingerprint else []
        return tuple(hashlib.sha256(_encode(one)).hexdigest() for one in [*identified, body])

    def to_bytes(self) -> bytes:
        """Encodes the specification for the state storage.

        Returns:
            The encoded specification.
        """
        return _encode(self._body() | ({"fingerprint": self.fingerprint} if self.fingerprint else {}))

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
        """Decodes what `to_bytes` returned.

        Args:
            data: The encoded specification.

        Returns:
            The specification.

        Raises:
            RecordUnreadable: The bytes are damaged, or have another format.
        """
        try:
            found = json.loads(data)
            if found["format"] != _FORMAT:
                raise RecordUnreadable(
                    f"the specification has format {found['format']}, but this version of stagecrew supports only "
                    f"format {_FORMAT}: use the version that wrote it"
                )
            files = {name: b64decode(text, validate=True) for name, _, text in found["files"]}
            for name, digest, _ in found["files"]:
                if hashlib.sha256(files[name]).hexdigest() != digest:
                    raise RecordUnreadable(f"the digest of its file {name} does not match: submit the job again")
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
            raise RecordUnreadable(f"the specification is damaged: {error_text(error)}") from error

    @classmethod
    def of_function(
        cls,
        target: str,
        arguments: Mapping[str, Any],
        conf: Mapping[str, str] | None = None,
        py_files: Iterable[str | Path] = (),
        max_attempts: int = _DEFAULT_ATTEMPTS,
    ) -> JobSpec:
        """Returns a job that calls a function. The function's return value is the job's result.

        If the module is a single file that is on `sys.path` and not installed, the file is stored with the job.
        Packages, and modules that this file imports, must be in `py_files` unless they are installed.

        The arguments are checked against the source code, which is not run. If the function is decorated, or is not
        defined by exactly one top-level `def`, any arguments are accepted.

        Args:
            target: `module:function`.
            arguments: The arguments, by name. They must be picklable.
            conf: The Spark configuration.
            py_files: `.py`, `.zip` or `.egg` files, as for spark-submit.
            max_attempts: The maximum number of runs. If all of them are lost, the job fails.

        Returns:
            The specification.

        Raises:
            ConfigurationError: The module has no such function, the function does not take these arguments, or an
                argument cannot be pickled.

        Examples:
            >>> from stagecrew.recovery import JobSpec
            >>> JobSpec.of_function("textwrap:dedent", {"text": "  hello"}).name
            'dedent'
        """
        match = _TARGET.fullmatch(target)
        if match is None:
            raise ConfigurationError(
                f"{target!r} does not name a function: write module:function, such as etl.nightly:load"
            )
        module, function = match.groups()
        files = _read_files(py_files)
        if not is_in_files(module, files):
            files |= module_file(module, function)
        try:
            from pyspark import cloudpickle

            given = dict(sorted(arguments.items()))
            pickled = bytes(cloudpickle.dumps(given))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigurationError(
                f"the arguments of {target} cannot be pickled ({error_text(error)}): pass simpler values"
            ) from error
        from stagecrew.listeners.fingerprints import fingerprint

        identity = fingerprint(given, pickled).hex()
        spec = cls(target, pickled, _client_mode(conf), files, None, _checked(max_attempts), identity)
        check_arguments(target, read_source(module, files), function, given)
        return spec

    @classmethod
    def of_script(
        cls,
        path: str | Path,
        arguments: Sequence[str] = (),
        conf: Mapping[str, str] | None = None,
        py_files: Iterable[str | Path] = (),
        max_attempts: int = _DEFAULT_ATTEMPTS,
    ) -> JobSpec:
        """Returns a job that runs a script with a command line. The job's result is None.

        Args:
            path: The path of the script.
            arguments: The command line of the script, without its name.
            conf: The Spark configuration.
            py_files: `.py`, `.zip` or `.egg` files, as for spark-submit.
            max_attempts: The maximum number of runs. If all of them are lost, the job fails.

        Returns:
            The specification.

        Raises:
            ConfigurationError: The script or a file cannot be read, or the script is not valid Python.

        Examples:
            >>> import pathlib, tempfile
            >>> from stagecrew.recovery import JobSpec
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "nightly.py")
            ...     _ = path.write_text("import sys; print(sys.argv)")
            ...     spec = JobSpec.of_script(path, ["2013-01-01"])
            >>> spec.target, spec.arguments
            ('nightly.py', ('2013-01-01',))
        """
        [(name, data)] = _read_files([path]).items()
        try:
            compile(data, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise ConfigurationError(f"{path} is not a valid Python script ({error}): fix it") from error
        return cls(name, tuple(arguments), _client_mode(conf), _read_files(py_files), data, _checked(max_attempts))


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _client_mode(conf: Mapping[str, str] | None) -> dict[str, str]:
    conf = dict(conf or {})
    if conf.get("spark.submit.deployMode", "client") != "client":
        raise ConfigurationError(
            "jobs run in Spark's client mode, because the leader watches their processes on its own host: remove "
            "spark.submit.deployMode"
        )
    return conf


def _checked(max_attempts: int) -> int:
    if max_attempts < 1:
        raise ConfigurationError(f"max_attempts is {max_attempts}: it must be at least 1")
    return max_attempts


def _read_files(paths: Iterable[str | Path]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in map(Path, paths):
        if path.name in files:
            raise ConfigurationError(
                f"two files are named {path.name}, but the driver puts all files into one folder: rename one of them"
            )
        try:
            files[path.name] = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read ({error.strerror or error}): check the path") from error
    return files
