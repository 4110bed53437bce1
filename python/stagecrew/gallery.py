"""The examples that the package contains: programs and notebooks that run as they are."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stagecrew.errors import ConfigurationError

__all__ = ["Example", "copy_examples", "find_examples"]

#: The folder of the examples. It is not a Python package: importing an example would run it.
_FOLDER: Final = Path(__file__).parent / "examples"


@dataclasses.dataclass(frozen=True)
class Example:
    """An example: its name, its file, and its description, whose first paragraph is a summary."""

    name: str
    path: Path
    description: str

    @property
    def summary(self) -> str:
        """The first paragraph of the description, on one line."""
        return " ".join(self.description.split("\n\n")[0].split())

    @property
    def is_notebook(self) -> bool:
        """Whether it is a Jupyter notebook."""
        return self.path.suffix == ".ipynb"

    @classmethod
    def read(cls, path: Path) -> Example:
        """Reads the description: the docstring of a program, or the first cell of a notebook without its heading."""
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            _heading, _, description = "".join(json.loads(text)["cells"][0]["source"]).partition("\n")
        else:
            description = ast.get_docstring(ast.parse(text)) or ""
        return cls(path.stem, path, description.strip())


def find_examples() -> list[Example]:
    """Returns all examples: first the programs, then the notebooks, each in the order of their names."""
    found = [Example.read(path) for pattern in ("*.py", "*.ipynb") for path in sorted(_FOLDER.glob(pattern))]
    if not found:
        raise ConfigurationError(f"the installation of stagecrew has no examples in {_FOLDER}: install it again")
    return found


def copy_examples(names: Sequence[str], folder: Path) -> list[Path]:
    """Copies examples into a folder. Copies none if a name is unknown, or if a file exists and differs.

    Args:
        names: Names of examples.
        folder: An existing folder.

    Returns:
        The paths of the copies.

    Raises:
        ConfigurationError: A name is unknown, or a file of this name exists with other content.
    """
    known = {one.name: one for one in find_examples()}
    for name in names:
        if name not in known:
            raise ConfigurationError(f"there is no example {name!r}; `stagecrew examples` lists them all")
    targets = {folder / known[name].path.name: known[name].path.read_bytes() for name in names}
    for target, content in targets.items():
        if target.exists() and target.read_bytes() != content:
            raise ConfigurationError(f"{target} exists and differs from the example: move it, or use another folder")
    for target, content in targets.items():
        target.write_bytes(content)
    return list(targets)
