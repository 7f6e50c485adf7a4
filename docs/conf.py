"""The documentation site: `make docs` builds it into docs/_build/html."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "streamload"
author = "The streamload authors"
copyright = "The streamload authors. Apache-2.0"  # noqa: A001
version = release = version_of("streamload")

extensions = ["myst_parser", "generated", "llms"]
exclude_patterns = ["_build"]
highlight_language = "none"
nitpicky = True
smartquotes = False  # the text has its own, and code beside it

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "streamload"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
