"""Debian's chromium, headless: tests that open a page in it are skipped where it is missing."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="chromium is missing: install it (`make test` tries to)"
)


def evaluated(page: Path, script: str, width: int = 1240) -> str:
    """What a script on a page returns, once the page is laid out; it is added to a copy of the page."""
    copy = page.with_name(f"{page.stem}-{width}-examined.html")
    ending = (
        "<script>let said;try{said=String((function(){"
        + script
        + "})())}catch(error){said='error: '+error}"
        + "const pre=document.createElement('pre');pre.id='said';pre.textContent=said;"
        + "document.body.append(pre)</script>"
    )
    copy.write_text(page.read_text() + ending)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={page.parent}/chromium", f"--window-size={width},1000", "--dump-dom"]
    done = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return html.unescape(found[1])
