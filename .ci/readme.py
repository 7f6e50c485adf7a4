"""Make the README of a tree one that is read elsewhere, on a package index: `make release` does so in a copy.

    readme.py FOLDER [URL]

Relative links lead nowhere there. With the URL at which the repository's files can be had they are absolute,
and the metadata names it; without one links are taken away from their texts, and pictures are left out.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def elsewhere(readme: str, url: str) -> str:
    """The README with links that lead to `url`, or with none."""

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if url:
            place = (
                url.replace("/blob/", "/raw/") if picture else url
            )  # GitHub's page of a picture is no picture
            return f"{picture}[{text}]({place}/{target})"
        return "" if picture else text

    return LINK.sub(link, readme)


def with_urls(project: str, url: str) -> str:
    """pyproject.toml with the project's URLs."""
    pages = {"Source": url, "Documentation": f"{url}/docs", "Changelog": f"{url}/CHANGELOG.md"}
    urls = "\n".join(["[project.urls]", *(f'{name} = "{page}"' for name, page in pages.items()), ""])
    return project.replace("[project.scripts]", f"{urls}\n[project.scripts]", 1)


def rewrite(folder: Path, url: str) -> None:
    """Rewrite README.md and pyproject.toml of a tree."""
    url = url.rstrip("/")
    readme, project = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(elsewhere(readme.read_text(), url))
    if url:
        project.write_text(with_urls(project.read_text(), url))


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
