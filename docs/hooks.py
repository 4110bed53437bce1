"""MkDocs hooks: insert generated tables and repository files into pages, so that pages cannot differ from them."""

import os
import sys
import tomllib
from pathlib import Path

from stagecrew.conf import table
from stagecrew.gallery import find_examples

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

from measurements import Figure

LANGUAGES = {
    ".py": "python",
    ".conf": "properties",
    ".properties": "properties",
    ".service": "ini",
    ".yaml": "yaml",
    ".yml": "yaml",
    "Dockerfile": "dockerfile",
}


def on_config(config):
    """Adds a link to the repository, if pyproject.toml names its address.

    If mike builds the site, adds its list of versions. Without mike there is no such list, and a browser would report
    an error.
    """
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    if repository:
        config.repo_url, config.repo_name = repository, "stagecrew"
    return config


def file_block(path):
    """The lines of a block with a file of the repository. An example has its name only, because users have a copy."""
    title = path.name if path.parent.name == "examples" else path.relative_to(ROOT)
    text = path.read_text(encoding="utf-8").rstrip()
    return [f'```{LANGUAGES[path.suffix or path.name]} title="{title}"', *text.split("\n"), "```"]


def indented(lines):
    """The lines of a block inside an admonition."""
    return [f"    {line}" if line else line for line in lines]


def on_page_markdown(markdown, page, config, files):
    """Replaces comments in a page.

    `<!-- configuration-table -->` becomes the table of keys, `<!-- file: PATH -->` that file, `<!-- bench: FIGURE -->` a
    table and a chart of this figure, `<!-- examples -->` all examples, and `<!-- changelog -->` the changelog.
    """
    lines = []
    for line in markdown.split("\n"):
        if line == "<!-- configuration-table -->":
            lines.append(table())
        elif line == "<!-- examples -->":
            for example in find_examples():
                lines += [f"## {example.name} {{ #{example.name} }}", "", example.description, ""]
                if not example.is_notebook:
                    lines += [f'??? example "{example.path.name}"', "", *indented(file_block(example.path)), ""]
        elif line == "<!-- changelog -->":
            lines.append((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "]("))
        elif line.startswith("<!-- bench: "):
            name = line.removeprefix("<!-- bench: ").removesuffix(" -->")
            figure = Figure.read(ROOT / "docs" / "assets" / "bench" / f"{name}.json")
            lines += [figure.markdown(), "", f"![The rounds of {name}](../assets/bench/{name}.svg)"]
        elif line.startswith("<!-- file: "):
            lines += file_block(ROOT / line.removeprefix("<!-- file: ").removesuffix(" -->"))
        else:
            lines.append(line)
    return "\n".join(lines)
