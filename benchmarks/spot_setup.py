"""What a simulation of daemons on spot nodes is told."""

from dataclasses import dataclass, replace

from streamload.options import Settings, parse_size


@dataclass(frozen=True)
class Setup:
    """What is simulated. A node is a spot node; a group is read by one node of trainers.

    Attributes:
        runs: each reads all shards, in an order of its own.
        groups: of each run.
        shards: of the data; they are read once.
        bytes_per_second: what a group reads when it doesn't wait.
        ahead: shards that a group fetches in front of its reading by itself.
        origin, uplink, stream: bytes per second from the origin to all, to all trainers, in one transfer.
        node: bytes per second that a spot node takes from the origin.
        shared: bytes per second of one transfer from or to the shared cache.
        request_seconds: until a small request is answered.
        gets, puts: that a partition of the shared cache answers in a second; leases and progress are in one.
        partitions: that the shards are in.
        asks: of so many of the next missing shards a daemon asks in one look; None: of all in its window.
        get_bytes, put_bytes: of the pieces in which a shard is read and written.
        window: seconds of reading that daemons hold in front of each group (window_bytes: so many of all).
        follows: how many groups a node follows; None: all.
        lost_per_hour: how often a node is taken away; loss: when and which share of all is taken at once.
        returns: whether nodes that are taken are replaced, after `replace_seconds` in the mean.
        notice_seconds: 0: none, as with SIGKILL.
        head_start: seconds that daemons work before the trainers begin.
        write_back: whether trainers store what they fetched from the origin.
    """

    runs: int = 1
    groups: int = 1_000
    shards: int = 1_500_000
    shard_bytes: float = 300e6
    bytes_per_second: float = 25e6
    ahead: int = int(parse_size(Settings.ahead.default, "ahead") / 300e6)
    origin: float = 37.5e9
    uplink: float = 10e9
    stream: float = 30e6
    nodes: int = 200
    node: float = 250e6
    shared: float = 100e6
    request_seconds: float = 0.02
    gets: float = 5_500.0
    puts: float = 3_500.0
    partitions: int = 8
    asks: int | None = None
    get_bytes: float = 8 * 2**20
    put_bytes: float = 8 * 2**20
    window: float = 600.0
    window_bytes: float | None = None
    follows: int | None = 20
    lost_per_hour: float = 0.0
    loss: tuple[float, float] | None = None
    returns: bool = True
    replace_seconds: float = 540.0
    notice_seconds: float = 120.0
    head_start: float = 0.0
    write_back: bool = False
    seconds: float = 3600.0
    seed: int = 0

    @property
    def demand(self) -> float:
        """Bytes per second that all groups read when none waits."""
        return self.runs * self.groups * self.bytes_per_second

    @property
    def shard_seconds(self) -> float:
        return self.shard_bytes / self.bytes_per_second

    def scaled(self, share: float) -> "Setup":
        """The same at another size: all that is counted, and the rates that all share."""
        return replace(
            self,
            groups=round(self.groups * share),
            shards=round(self.shards * share),
            nodes=round(self.nodes * share),
            origin=self.origin * share,
            uplink=self.uplink * share,
            gets=self.gets * share,
            puts=self.puts * share,
        )
