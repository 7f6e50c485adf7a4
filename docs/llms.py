"""llms.txt: the pages of the site in a line each, for programs that read documentation.

Beside it llms-full.txt has the guides and the reference in one file, and each page is there as Markdown, with
what is generated filled in. Groups and order are those of the contents in index.md, the form is that
of https://llmstxt.org. Links lead to pages; other files of the repository aren't on the site, and are named.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import generated

DOCS = Path(__file__).parent
_GROUP = re.compile(r"^```\{toctree\}\n:caption: ([^\n]+)\n:hidden:\n\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INCLUDED = re.compile(r"^```\{include\} (.+)\n:relative-docs: docs/\n```$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")
_OPTIONAL = ("How it works", "Results", "Project")
"""Groups that a reader with little room can leave out."""
_MOST = 240
_HOW = """\
`streamload.make_loader(urls, tokenizer, batch_size=…)` returns a loader to iterate. Its options are grouped
(`Shards`, `Images`, `Order`, `Batches`, `Cache`, `Workers`), which the page of arguments has in full.
`streamload doctor` says what is wrong with an installation, `print(loader.verdict())` what limits a training,
and `streamload.testing` makes shards and servers for tests. All pages are Markdown; llms-full.txt has all but
the optional ones in one file."""


def groups() -> dict[str, list[str]]:
    """The names of pages by the caption of their group."""
    index = (DOCS / "index.md").read_text()
    return {caption: names.split() for caption, names in _GROUP.findall(index)}


def page(name: str) -> str:
    """A page as Markdown, as the site has it: without comments, with what is generated or included."""
    text = (DOCS / f"{name}.md").read_text()
    up = "../" * name.count("/")
    text = generated.MARK.sub(lambda found: generated.PARTS[found[1]]().replace("](/", f"]({up}"), text)
    text = _INCLUDED.sub(lambda found: (DOCS / found[1]).read_text().replace("](docs/", "]("), text)
    return re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)


def relinked(text: str, name: str, folder: str) -> str:
    """A page's text with its links as they lead from a folder of the site."""
    names = {page for group in groups().values() for page in group}

    def link(match: re.Match[str]) -> str:
        picture, label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else f"{name}.md"
        if path.removesuffix(".md") in names:
            return f"[{label}]({posixpath.relpath(path, folder or '.')}{anchor or ''})"
        file = path.removeprefix("../")
        return label if picture or label.strip("`") == file else f"{label} ({file})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def title_of(text: str) -> str:
    """The heading of a page."""
    return next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")


def said_of(text: str) -> str:
    """The first sentence of a page, as plain text."""
    blocks = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n")
    prose = next(block for block in blocks if re.match(r"\s*[\w`*\[]", block))
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace("**", "")
    sentence = re.split(r"(?<=[.:?])\s+(?=[A-Z`])", plain)[0].rstrip(":")
    return sentence if len(sentence) <= _MOST else f"{sentence[: _MOST - 2].rpartition(' ')[0]} …"


def files() -> dict[str, str]:
    """What is written beside the site, by path."""
    texts = {name: page(name) for names in groups().values() for name in names}
    lines = ["# streamload", "", f"> {said_of(page('index'))}", "", _HOW]
    for caption, names in _grouped().items():
        lines += ["", f"## {caption}", ""]
        lines += [f"- [{title_of(texts[name])}]({name}.md): {said_of(texts[name])}" for name in names]
    kept = [name for caption, names in _grouped().items() if caption != "Optional" for name in names]
    return {
        "llms.txt": "\n".join(lines) + "\n",
        "llms-full.txt": "\n\n".join(relinked(texts[name], name, "") for name in kept) + "\n",
        **{f"{name}.md": relinked(text, name, posixpath.dirname(name)) for name, text in texts.items()},
    }


def _grouped() -> dict[str, list[str]]:
    """The groups, the optional ones as one at the end."""
    everything = groups()
    optional = [name for caption in _OPTIONAL for name in everything.pop(caption)]
    return {**everything, "Optional": optional}


def setup(sphinx: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    sphinx.connect("build-finished", _write)
    return {"parallel_read_safe": True}


def _write(sphinx: Any, error: Exception | None) -> None:
    if error is None and sphinx.builder.format == "html":
        for name, text in files().items():
            target = Path(sphinx.outdir) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
