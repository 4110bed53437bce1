"""Finds the source file of a job's function, and checks whether the function accepts the job's arguments."""

from __future__ import annotations

import ast
import importlib.util
import io
import site
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stagecrew.errors import ConfigurationError

__all__ = ["check_arguments", "is_in_files", "module_file", "read_source"]


def is_in_files(module: str, files: Mapping[str, bytes]) -> bool:
    """Returns whether one of the job's files contains the module."""
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
                raise ConfigurationError(
                    f"{name} is not a valid archive ({error}): create it again with zip"
                ) from error
    return False


def module_file(module: str, function: str) -> dict[str, bytes]:
    """Returns the file name and source of a module, to store with the job; empty if the module is installed.

    Raises `ConfigurationError` if the module does not exist, belongs to a package that is not installed, or lacks the
    function.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise ConfigurationError(
            f"module {module!r} is neither installed here nor in the files of the job: submit the job where the "
            "module can be imported, or add its file with --py-files"
        )
    origin = Path(found.origin)
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")] + [site.getusersitepackages()]
    if not found.has_location or any(origin.is_relative_to(folder) for folder in installed):
        return {}
    if "." in module or origin.name == "__init__.py":
        raise ConfigurationError(
            f"module {module!r} belongs to a package that is not installed, so a standby would not find it: zip the "
            "package, and add it with --py-files"
        )
    source = origin.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(f"{origin.name} is not a valid Python module ({error}): fix it") from error
    has_star_import = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    if not has_star_import and function not in compile(tree, str(origin), "exec").co_names:
        raise ConfigurationError(f"module {module!r} ({origin.name}) does not define {function!r}: check the name")
    return {origin.name: source}


def read_source(module: str, files: Mapping[str, bytes]) -> bytes | None:
    """Returns the source of a module from the job's files or this environment; None if it has no Python source."""
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


def check_arguments(target: str, source: bytes | None, function: str, given: Mapping[str, Any]) -> None:
    """Raises `ConfigurationError` if the source shows that the function does not accept the `given` arguments."""
    try:
        tree = ast.parse(source or b"")
    except (SyntaxError, ValueError):
        return  # the source is written for another Python version; the run reports any error
    bound = [node for node in ast.walk(tree) if function in _bound_names(node)]
    found = bound[0] if len(bound) == 1 else None
    if not isinstance(found, ast.FunctionDef) or found not in tree.body or found.decorator_list:
        return
    parameters = found.args
    by_name = [one.arg for one in (*parameters.args, *parameters.kwonlyargs)]
    optional = (
        [one.arg for one in parameters.args[len(parameters.args) - len(parameters.defaults) :]]
        if parameters.defaults
        else []
    )
    optional += [one.arg for one, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if default]
    defaults_by_position = max(0, len(parameters.defaults) - len(parameters.args))
    by_position = parameters.posonlyargs[: len(parameters.posonlyargs) - defaults_by_position]
    problems = []
    if by_position:
        problems.append(f"takes {by_position[0].arg} by position only")
    if missing := [name for name in by_name if name not in given and name not in optional]:
        problems.append(f"is called without {', '.join(missing)}")
    if unknown := [name for name in given if name not in by_name and parameters.kwarg is None]:
        problems.append(f"does not take {', '.join(unknown)}")
    if problems:
        raise ConfigurationError(
            f"{target} {' and '.join(problems)}: it takes {', '.join(by_name) or 'no arguments by name'}; pass them "
            "by name (--arg name=text)"
        )


def _bound_names(node: ast.AST) -> Iterable[str]:
    """Returns the names that a syntax node can bind."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return (node.id,)
    if isinstance(node, ast.alias):
        return ((node.asname or node.name).partition(".")[0],)
    return ()
