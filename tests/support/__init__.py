"""Harnesses that tests start their processes in."""
