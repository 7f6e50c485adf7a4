"""Test helpers for users: shards, servers that fail, exact resumption, a suite for extensions."""

import sys

if "pytest" in sys.modules:  # so that failing assertions of the suites show their values
    sys.modules["pytest"].register_assert_rewrite("streamload.testing.extension", "streamload.testing.resume")
