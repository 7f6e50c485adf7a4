"""The kernel's classes in the contract of extensions: those that it names are those that a process gets."""

import ast
import subprocess
import sys
from pathlib import Path

import streamload.extension
from streamload.extension import kernel


def test_each_class_that_a_process_gets_is_the_one_that_type_checkers_see():
    tree = ast.parse(Path(kernel.__file__).read_text())
    named = {
        name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert {name: named[name] for name in kernel.CLASSES} == kernel.CLASSES
    for name in streamload.extension.__all__:
        assert getattr(streamload.extension, name).__module__.startswith("streamload.") or name == "Fact"


def test_the_contract_starts_without_torch():
    code = "import sys, streamload.extension; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
