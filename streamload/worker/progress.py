"""Publishes a run's plan and the progress of this process's groups, for daemons that follow the run."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.daemon.plan_file import PlannedSource, Progress, plan_of
from streamload.daemon.publisher import Publisher
from streamload.worker.messages import WorkerConfig
from streamload.worker.reference_stream import ReferenceStream


class ProgressPublisher:
    """The publisher of one process.

    Args:
        config: the run.
        publisher: writes the files.
    """

    def __init__(self, config: WorkerConfig, publisher: Publisher):
        self._publisher = publisher
        self._groups = config.split.groups_told_by(config.rank)
        self._sources = range(len(config.sources))
        preparation = config.assembly.preparation
        self._prepared_by = "" if preparation is None else preparation.name

    @classmethod
    def of(cls, config: WorkerConfig) -> ProgressPublisher | None:
        """The publisher of a run; None without a shared cache, or if it isn't a training."""
        if config.shared is None or not config.train:
            return None
        sources = [PlannedSource(source.count, source.order) for source in config.sources]
        shards = config.shards
        prepare = "" if config.assembly.preparation is None else str(config.assembly.preparation)
        publisher = Publisher(
            config.shared.open_objects(),
            lambda: plan_of(sources, config.one_pass, shards.urls, shards.storage_options, prepare),
        )
        return cls(config, publisher)

    def publish(
        self, epoch: int, streams: Mapping[tuple[int, int], ReferenceStream], ahead: int, mean_bytes: float
    ) -> None:
        """Publish how far the groups are; takes microseconds.

        Args:
            epoch: of the order.
            streams: by group and source, those that have begun.
            ahead: how many of the next shards this process fetches itself.
            mean_bytes: the mean size of its shards.
        """
        for group in self._groups:
            begun = [streams.get((group, source)) for source in self._sources]
            fronts = tuple((0, 0) if stream is None else stream.front for stream in begun)
            self._publisher.tell(
                Progress(group, epoch, fronts, ahead, mean_bytes, prepared=self._prepared_by)
            )

    def close(self) -> None:
        """Stop publishing; the last files stay. Idempotent."""
        self._publisher.close()
