"""Abilities of servers, learned from their answers and kept for all shards of a server (step F).

Known to one process and its forks. The latest answer holds: backends of one server may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamload.origins.protocol import Version
from streamload.urls import endpoint, redact


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a server; None: no answer has shown it yet.

    Attributes:
        ranges: it answers a request for a range with that range (206), so that a sample can be read alone.
        sizes: it states the size of a shard.
        versions: what tells two versions of a shard apart: "ETag", "date", or "" for nothing.
    """

    ranges: bool | None = None
    sizes: bool | None = None
    versions: str | None = None

    def __str__(self) -> str:
        """Describe the server for a person."""
        ranges = {None: "byte ranges not tried", True: "byte ranges", False: "no byte ranges"}[self.ranges]
        sizes = {None: "sizes not seen", True: "sizes", False: "no sizes"}[self.sizes]
        versions = {None: "versions not seen", "": "nothing tells versions apart"}
        return f"{ranges}, {sizes}, {versions.get(self.versions, f'versions by {self.versions}')}"


_by_endpoint: dict[str, Abilities] = {}


def abilities(url: str) -> Abilities:
    """Return what is known of the server of a shard."""
    return _by_endpoint.get(_server(url), Abilities())


def learn_ranges(url: str, has_ranges: bool) -> None:
    """Note how a request for a range was answered."""
    _by_endpoint[_server(url)] = replace(abilities(url), ranges=has_ranges)


def learn_version(url: str, version: Version) -> None:
    """Note what an answer says about a shard's version."""
    validator = "ETag" if version.etag else "date" if version.last_modified else ""
    has_size = version.size is not None
    _by_endpoint[_server(url)] = replace(abilities(url), sizes=has_size, versions=validator)


def forget() -> None:
    """Forget all servers."""
    _by_endpoint.clear()


def _server(url: str) -> str:
    return endpoint(redact(url))
