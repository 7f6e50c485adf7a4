"""Bytes before they are needed: what fills a tier in front of its readers."""
