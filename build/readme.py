"""The README as a package index shows it, where links to files of the repository lead nowhere."""

from __future__ import annotations

import re

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


def published(readme: str, repository: str) -> str:
    """Returns the README with links to the repository. Without its address, without these links and pictures."""

    def link(match: re.Match[str]) -> str:
        picture, text, path, fragment = match.groups(default="")
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{path}{fragment})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)  # code stays as it is
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))


def urls(repository: str) -> dict[str, str]:
    """Returns the project's addresses for a package index."""
    if not repository:
        return {}
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {"Repository": repository} | {name: f"{repository}/blob/main/{path}" for name, path in pages.items()}
