"""What MkDocs calls while it builds: fills in what is made from the code, so that no page can differ from it."""

from pathlib import Path

from stagecrew.conf import table

ROOT = Path(__file__).parent.parent
LANGUAGES = {".py": "python", ".conf": "properties", ".properties": "properties", ".service": "ini"}


def on_page_markdown(markdown, page, config, files):
    """Replaces `<!-- configuration-table -->` by the table of keys, and `<!-- file: PATH -->` by the file's text."""
    lines = []
    for line in markdown.split("\n"):
        if line == "<!-- configuration-table -->":
            lines.append(table())
        elif line.startswith("<!-- file: "):
            path = ROOT / line.removeprefix("<!-- file: ").removesuffix(" -->")
            lines += [
                f'```{LANGUAGES[path.suffix]} title="{path.relative_to(ROOT)}"',
                path.read_text(encoding="utf-8").rstrip(),
                "```",
            ]
        else:
            lines.append(line)
    return "\n".join(lines)
