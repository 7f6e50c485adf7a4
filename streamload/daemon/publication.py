"""The extension by which a training with a shared cache publishes its plan and progress, for daemons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.cache.shared.sharing import SharedOptions
from streamload.daemon.plan_file import PlannedSource, PlanProgress, plan_of
from streamload.daemon.publisher import PlanPublisher
from streamload.extension import BatchRows, Extension, WorkerPart, WorkerProcess
from streamload.urls import UrlList


@dataclass(frozen=True, slots=True)
class PlanPublication(Extension):
    """Publishes a run's plan, and the progress of this rank's groups.

    Attributes:
        shared: the shared cache.
        sources: of the run.
        one_pass: an epoch is a pass.
        urls: of the shards.
        storage_options: of fsspec.
        groups: whose progress this rank publishes.
        prepare, prepared_by: the recipe of prepared images, and its full name; "": they aren't prepared.
    """

    shared: SharedOptions
    sources: Sequence[PlannedSource]
    one_pass: bool
    urls: UrlList
    storage_options: Mapping[str, Any] | None
    groups: Sequence[int]
    prepare: str
    prepared_by: str

    name = "plan"

    def in_worker(self, process: WorkerProcess) -> PublishingPart | None:
        """Its part in the first worker, which publishes; None in the others."""
        return None if process.number else PublishingPart(self, process)


class PublishingPart(WorkerPart):
    """The part of the worker that publishes.

    Args:
        publication: what is published.
        process: has the progress.
    """

    def __init__(self, publication: PlanPublication, process: WorkerProcess):
        self._publication, self._process = publication, process
        self._publisher = PlanPublisher(
            publication.shared.open_objects(),
            lambda: plan_of(
                publication.sources,
                publication.one_pass,
                publication.urls,
                publication.storage_options,
                publication.prepare,
            ),
        )

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """Publish how far the groups are; takes microseconds."""
        progress, prepared_by = self._process.progress(), self._publication.prepared_by
        for group in self._publication.groups:
            fronts = tuple(
                progress.fronts.get((group, source), (0, 0))
                for source in range(len(self._publication.sources))
            )
            self._publisher.tell(
                PlanProgress(
                    *(group, progress.epoch, fronts, progress.shards_ahead, progress.mean_bytes),
                    prepared=prepared_by,
                )
            )
        return b""

    def close(self) -> None:
        """Stop publishing; the last files stay. Idempotent."""
        self._publisher.close()
