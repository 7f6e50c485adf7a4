"""The epochs of a run: their order and length, and where the loader is in them (steps B to E).

Rank and order are settled when they are first needed, not when the loader is made: torch.distributed may be
initialised in between, and sizes.json files may have to be read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError, StateMismatch
from streamload.loader.options import LoaderOptions
from streamload.loader.order_spec import (
    OrderSpec,
    compare_groups,
    data_digest,
    fit_to_cache,
    make_order_spec,
    own_groups,
    settle_opening,
    source_orders,
    split_for,
)
from streamload.loader.position import EpochTracker, Position
from streamload.options.values import at_least
from streamload.order.events import BATCH_SIZE, WEIGHTS, Event, new_batch_size, new_weights, shares_of
from streamload.order.plan import OrderOptions
from streamload.order.steps import SourceDraws, Split, StepOptions, Steps
from streamload.ranks.distributed import first_value
from streamload.topology import RunAttempt, Topology, read_rank, read_topology

if TYPE_CHECKING:
    from streamload.cache.forecast import Measure
    from streamload.cache.shard import ShardList
    from streamload.loader.sizes import ShardSizes, Sizes

logger = logging.getLogger("streamload")


class RunSchedule:
    """The epochs of one loader.

    Args:
        options: the loader's.
        count: counts the samples of an epoch's pass by the indexes in the cache; None: one is incomplete.

    Attributes:
        tracker: of the epoch and the position in it.
        attempt: of the run, if it has had to be known.
    """

    def __init__(self, options: LoaderOptions, count: Callable[[int], int | None]):
        self.tracker = EpochTracker(options.epochs_continue)
        self.attempt: RunAttempt | None = None
        self._options, self._count = options, count
        self._counted: tuple[int, int] | None = None  # epoch, samples by the indexes in the cache
        self._batches: int | None = None  # as of the last call of `batches`
        self._topology: Topology | None = None
        self._topology_pid = 0  # of the process that read it
        self._settled: OrderSpec | None = None
        self._saved: OrderSpec | None = None  # of the state that was loaded last
        self._data_digest: str | None = None
        self._sizes: ShardSizes | None = None  # once something needs them
        self._groups_cut_by: str | None = None  # a digest of the sizes that decided on the groups

    @property
    def topology(self) -> Topology:
        """This rank among those that share the data: read at first use, and kept.

        A process that was forked with an unused schedule reads its own.

        Raises:
            OptionError: contradictory variables, where neither Order(rank=…) nor torch.distributed has it.
        """
        is_inherited = self._topology_pid != os.getpid() and self.tracker.is_unused
        if self._topology is None or is_inherited:
            rank, world_size = self._options.order.rank, self._options.order.world_size
            self._topology = Topology() if self._is_whole_set else read_topology(rank, world_size)
            self._topology_pid, self._settled = os.getpid(), None
        return self._topology

    def check_rank(self) -> None:
        """Check that this process still has the rank by which length, state or order were computed.

        Raises:
            OptionError: it has another one now.
        """
        before = self.topology
        if self._is_whole_set:
            return
        rank, world_size, source = read_rank(self._options.order.rank, self._options.order.world_size)
        if (rank, world_size) != (before.rank, before.world_size):
            raise OptionError(
                f"this loader's length, state or batches were first asked for as rank {before.rank} of "
                f"{before.world_size} ({before.source}), and this is rank {rank} of {world_size} ({source}): "
                f"make another loader now, and load the state if there is one; or ask for nothing before "
                f"torch.distributed is initialised; or give Order(rank=…, world_size=…)"
            )

    @property
    def _is_whole_set(self) -> bool:
        """True if each process has all samples: an evaluation that isn't split among ranks."""
        return not self._options.train and self._options.order.rank is None

    # How long an epoch is.

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None if only reading the data tells, or there is no end."""
        options = self._options
        if options.num_batches is not None or options.order.endless:
            return options.num_batches
        samples = self.epoch_samples()
        return None if samples is None else self.batches_of(samples)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None if only reading the data tells, or there is no end."""
        if not self._options.train:
            return self.epoch_samples()
        table, batches = self._options.listed_steps, self.num_batches
        if table is not None:
            return table.rows * self.topology.world_size
        return (
            None
            if batches is None or self._options.has_cells
            else batches * self.rows * self.topology.world_size
        )

    @property
    def rows(self) -> int:
        """Samples of a step of this rank, as set last; those of an epoch are by this size."""
        size = self.tracker.latest.get(BATCH_SIZE)
        if size is None:
            return self._options.batch_size
        batch: int = size.value["batch"]
        return batch // self.topology.world_size

    @property
    def most_rows(self) -> int:
        """The most samples of a step of this rank by the sizes of now: another one may be set already."""
        if BATCH_SIZE not in self.tracker.latest:
            return self._options.batch_size
        position = self.tracker.now()
        return max(
            self.rows, self.steps_from(position).at(position.position).batch // self.topology.world_size
        )

    @property
    def is_one_pass(self) -> bool:
        """True if an epoch is one pass over all data, read as one group."""
        return self._groups_by_options() == 1 and not self._options.epochs_continue

    @property
    def epochs_are_passes(self) -> bool:
        """True if each epoch is one pass, in evaluation over this rank's share of the data."""
        options = self._options
        return not options.train or (self.order.groups == 1 and not options.epochs_continue)

    @property
    def drawn_epoch(self) -> int:
        """The epoch by which the samples of its pass are counted: 0 if all passes have the same number."""
        if self._options.repeat is None:
            return 0
        self.settle()
        return self.tracker.now().sequence

    def batches_of(self, samples: int) -> int:
        """Batches of this rank in an epoch of so many samples over all ranks."""
        batch_size, topology = self.rows, self.topology
        rank, world_size = topology.rank, topology.world_size
        if self._options.train:
            return max(1, samples // (batch_size * world_size))
        share = (rank + 1) * samples // world_size - rank * samples // world_size
        return -(-share // batch_size)

    def batches(self) -> int | None:
        """Batches of this rank in an epoch, also by the indexes in the cache; None as for `num_batches`."""
        batches = self.num_batches
        if batches is None and self.is_one_pass and not self._options.has_cells:
            epoch = self.drawn_epoch
            if self._counted is None or self._counted[0] != epoch:
                samples = self._count(epoch)
                self._counted = None if samples is None else (epoch, samples)
            if self._counted is not None:
                batches = self.batches_of(self._counted[1])
        self._batches = batches
        return batches

    def samples(self) -> int | None:
        """Samples of an epoch over all ranks, also by the indexes in the cache; None as for `num_samples`."""
        samples, batches = self.num_samples, self.batches()
        if samples is not None or batches is None:
            return samples
        if not self._options.train:
            return None if self._counted is None else self._counted[1]
        return None if self._options.has_cells else batches * self.rows * self.topology.world_size

    def least_of_pass(self) -> int | None:
        """The fewest samples that a training takes of a pass over all shards; None if that is unknown."""
        samples = self._count(self.drawn_epoch)
        if samples is None and self._options.repeat is None:
            samples = self.listed_samples()
        step = self.rows * self.topology.world_size
        return None if samples is None else samples - samples % step or samples

    def expected(self, position: Position) -> int | None:
        """Batches of one pass after a position, by the sizes of shards; None unless `batches` was called."""
        if self._batches is None or not self.is_one_pass or self._options.repeat is not None:
            return None
        samples = self.epoch_samples() or (None if self._counted is None else self._counted[1])
        if position.base_batch is None or samples is None:
            return self._batches - self.step_of(position)
        return self.steps_within(position, samples)

    def steps(self, position: Position) -> int | None:
        """Steps of an epoch after a position; None: until the pass ends, or endless.

        Raises:
            OptionError: the epoch needs a length, and neither options nor sizes.json give one.
        """
        options, order = self._options, self.order
        if not options.train or options.order.endless or not (options.epochs_continue or order.groups > 1):
            return None
        batches = self.num_batches
        if batches is None:
            cause = "mixes several sources" if len(order.sources) > 1 else f"is on {order.groups} nodes"
            if options.has_cells:
                raise OptionError(
                    f"a run of cells that {cause} has to know how long an epoch is: give num_batches"
                )
            counts = "" if options.repeat is not None else "put a sizes.json beside the shards, "
            raise OptionError(
                f"a run that {cause} has to know how long an epoch is: give num_samples or num_batches, "
                f"{counts}or say endless=True"
            )
        split, table = self.split(), self._options.listed_steps
        if table is not None:
            offset = position.position - position.start
            return len(table.remaining(position.epoch, offset, split.ranks))
        if position.base_batch is None:
            return max(0, position.start + batches * split.batch - position.position) // split.batch
        if options.num_batches is not None:
            return max(0, options.num_batches - position.steps)
        return self.steps_within(position, self.epoch_samples() or 0)

    def steps_within(self, position: Position, samples: int) -> int:
        """Steps after a position, in training, of an epoch of so many samples from its start on."""
        left = self.steps_from(position).count_within(position.start + samples - position.position)
        return max(1, left) if position.position == position.start else left

    def steps_from(self, position: Position) -> Steps:
        """The steps from a position on."""
        return self.step_options.steps(position.step_start, position.batch_sizes)

    def step_of(self, position: Position, later: int | None = None) -> int:
        """The number in its epoch of the step that begins at a position.

        Args:
            position: of the run.
            later: the first step that begins there, or after it, instead.
        """
        split, table = self.split(), self._options.listed_steps
        offset = position.position - position.start
        if table is not None:
            offset = offset if later is None else later - position.start
            return table.count - len(table.remaining(position.epoch, offset, split.ranks))
        steps = offset // split.batch if position.base_batch is None else position.steps
        return steps if later is None else steps + self.steps_from(position).number(later)

    @property
    def reports_shards(self) -> bool:
        """True if this rank reads shards that no lower rank reads: it counts them for all."""
        topology = self.topology
        return not self._options.train or bool(self.split().groups_told_by(topology.rank))

    @property
    def left_out(self) -> dict[str, int]:
        """Samples left out so far, by what left them out, of the groups that no lower rank reads."""
        counted = dict.fromkeys(self._options.left_out_by, 0)
        if not counted or self.tracker.is_unused:
            return counted
        topology, groups = self.topology, self.order.groups
        counted_groups = (
            self.split().groups_told_by(topology.rank) if self._options.train else [topology.rank]
        )
        for group, tally in self.tracker.now().all_left_out.items():
            for name, count in tally.items() if group % groups in counted_groups else ():
                counted[name] = counted.get(name, 0) + count
        return counted

    def listed_samples(self) -> int | None:
        """The samples of all shards by sizes.json; None if one is unknown."""
        samples = [
            None if shard_sizes is None else int(shard_sizes.sum()) for shard_sizes in self._read_sizes()
        ]
        return None if None in samples else sum(count or 0 for count in samples)

    # In what order samples come.

    @property
    def order(self) -> OrderSpec:
        """The order of the run, settled if it wasn't."""
        return self.settle()

    def settle(self) -> OrderSpec:
        """The order of the run, computed at the first call."""
        topology = self.topology
        if self._settled is None:
            if WEIGHTS not in self.tracker.latest:
                self.tracker.latest[WEIGHTS] = self.weights({})
            self._settled = self._order(topology, self.tracker.latest[WEIGHTS].value["shares"])
        return self._settled

    def fit(self, shards: ShardList, limit_bytes: int, measure: Callable[[], Measure]) -> None:
        """At the start of a run, fit lanes, windows and their opening to the caches and what they copy.

        All ranks have to call it.

        Args:
            shards: of all sources.
            limit_bytes: of this node's tier.
            measure: opens what gives sizes of shards and samples; called if the tier may be too small.
        """
        order = self.settle()
        if not order.fitted:
            topology = self.topology
            order = settle_opening(order, self._options, topology, shards)
            self._settled = fit_to_cache(order, self._options, topology, shards, limit_bytes, measure)

    def source_orders(self) -> list[OrderOptions]:
        """The order of each source's own sequence.

        Raises:
            OrderDiverged: another rank found another number of groups, or another sizes.json.
        """
        order = self.order
        compare_groups(order, self.topology)
        is_cut = order.groups > 1
        sizes: list[Sizes] = [None] * len(order.sources)
        if is_cut:
            sizes = self._read_sizes()
        elif self._sizes is not None and self._sizes.are_used:
            self._read_sizes()  # they may have been read before the ranks were joined
        self._groups_cut_by = self._shard_sizes.digest(sizes) if is_cut else ""
        return source_orders(order, sizes)

    @property
    def step_options(self) -> StepOptions:
        """Options of the steps of the run."""
        split, blocks = split_for(self._options, self.topology, self.order.groups), self.order.blocks
        return self._options.step_options(split, None if blocks is None else blocks[0])

    @property
    def draws(self) -> SourceDraws:
        """The rows that are drawn from one source at once."""
        return SourceDraws(self.order.sources_of, self.order.multiple)

    def split(self) -> Split:
        """Split of steps among ranks."""
        return self.step_options.split

    def weights(self, changed: Mapping[str, float], position: int = 0) -> Event:
        """The weights of the sources, with some of them changed, from a position on.

        Args:
            changed: new weights by the sources' names.
            position: of the first step that goes by them.

        Raises:
            OptionError: an unknown name, or weights that can't be used.
        """
        sources = self._options.sources
        latest = self.tracker.latest.get(WEIGHTS)
        last = self.own_weights if latest is None else latest.value["weights"]
        weights = {source.name: weight for source, weight in zip(sources, last, strict=True)}
        unknown = sorted(changed.keys() - weights.keys())
        if unknown:
            raise OptionError(f"no source is named {', '.join(unknown)}; they are {', '.join(weights)}")
        all_weights = tuple((weights | dict(changed)).values())
        return new_weights(
            position, shares_of(all_weights, [source.floor for source in sources]), all_weights
        )

    @property
    def own_weights(self) -> tuple[float, ...]:
        """The weights that the sources were given, before any change."""
        sources = enumerate(self._options.sources)
        return tuple(source.weight * self._weighted_units(place) for place, source in sources)

    def source_samples(self, place: int) -> int | None:
        """The samples of a source by sizes.json; None if nothing says."""
        sizes = self._read_sizes()[place]
        return None if sizes is None else int(sizes.sum())

    def identity(self) -> dict[str, Any]:
        """Inputs of the samples of each step, apart from the changes of a run; JSON-able."""
        left_out = {"shards", "sizes", "fitted", "given"}
        if not self.order.parts:
            left_out |= {"sources_of", "parts"}
        order = {name: value for name, value in asdict(self.order).items() if name not in left_out}
        identity: dict[str, Any] = json.loads(json.dumps({**order, "batch": self.split().batch}))
        return identity

    # States.

    def state(
        self, counts: Mapping[str, Sequence[int]], fingerprint: Mapping[str, str], parts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of this rank, with its counts, what makes its rows, and the extensions' parts."""
        from streamload.loader.state import FINGERPRINT, to_state

        order = replace(self.order, sizes=self._groups_cut_by)  # settled first: the position may follow
        parts = {FINGERPRINT: fingerprint, **parts}
        return to_state(order, self.tracker.saved(), counts, parts, self.attempt)

    def agree_on_attempt(self) -> RunAttempt:
        """The attempt of this run, by the last state or the launcher; the same on ranks that are joined."""
        if self.attempt is None:
            order = self.order
            reads = f"{order.data} {order.seed} {order.train}"
            launched = json.dumps(RunAttempt.launched(reads))
            agreed = first_value(f"attempt {reads}", launched, self.topology.world_size)
            self.attempt = RunAttempt.parse(*json.loads(agreed))
        return self.attempt

    def load(self, state: Mapping[str, Any], moved: Mapping[str, str], has_other_plan: bool = False) -> None:
        """Resume from a state.

        Args:
            state: of a rank, or of several, joined.
            moved: old → new URL prefixes of shards that were moved since.
            has_other_plan: whether steps are planned by something else, such as what samples cost.

        Raises:
            StateMismatch: it is of another run.
        """
        from streamload.loader.state import (
            attempt_in,
            check_fits,
            check_options,
            from_block,
            has_more_shards,
            of_ranks,
            order_and_position,
        )

        saved, position = order_and_position(state)
        attempt = attempt_in(state)
        ours = self.settle()
        if moved:
            ours = replace(ours, data=data_digest(self._options, moved))
            position = position.in_moved_shards()
        if saved.data != ours.data and has_more_shards(self._options, saved, moved):
            position = self._over_more_shards(saved, position)
            saved = replace(saved, data=ours.data, shards=ours.shards)
        if position.position:
            ours = replace(ours, groups=saved.groups)
            if saved.groups > 1 and saved.sizes is not None:
                ours = replace(ours, sizes=self._shard_sizes.digest(self._read_sizes(saved.groups)))
        position = of_ranks(
            self._options,
            self.topology,
            from_block(self._options, saved, ours, position, has_other_plan, state),
        )
        needed = set(own_groups(self._options, self.topology, ours.groups))
        check_fits(saved, ours, position, needed)
        check_options(saved, self._order_by_options(), position, self._options)
        self._saved = saved if position.position else replace(saved, groups=ours.groups)
        self._groups_cut_by = saved.sizes if position.position else None
        self._settled = None
        self.attempt = None if attempt is None else attempt.next()
        self.tracker.load(position)

    def resized(self, rows: int, position: int) -> Event:
        """Another size of steps from a position on.

        Args:
            rows: of a rank.
            position: where a step begins, or a block of steps that are planned together.

        Raises:
            OptionError: steps can't have this size.
        """
        at_least(1, batch_size=rows)
        options, split = self._options, self.split()
        if not options.train:
            raise OptionError("set_batch_size() is for training: an evaluation has one batch_size")
        if options.listed_steps is not None:
            raise OptionError(
                "set_batch_size() is for steps of one size, and Patches(steps=…), or an extension, lists "
                "those of this run"
            )
        batch = rows * split.ranks
        if batch % split.groups or split.batch % split.groups:
            raise OptionError(
                f"set_batch_size({rows}): with {split.groups} groups (Order(groups=…)) a step has equal "
                f"parts of each, before and after, and {split.batch} and {batch} samples aren't both "
                f"multiples of that"
            )
        return new_batch_size(position, batch, options.block_steps(batch) or 1)

    def next_block(self, position: int) -> int:
        """The first position from this one on between two blocks; without blocks, this one."""
        block = self.steps_from(self.tracker.now()).block(position)
        return position if block is None or block.begin == position else block.end

    def _over_more_shards(self, saved: OrderSpec, position: Position) -> Position:
        """Position to resume from with more shards than the state has.

        Raises:
            StateMismatch: in the middle of an epoch, which keeps the shards that it started with.
        """
        before, now = sum(saved.shards), sum(len(source.urls) for source in self._options.sources)
        added = f"{now - before} shards were appended to the {before} of the state"
        if position.position != position.start:
            raise StateMismatch(
                f"{added}, which is from the middle of epoch {position.epoch}: an epoch keeps the shards "
                f"that it started with. Finish it with these and resume from the state after its end; or "
                f"load no state and call set_epoch({position.epoch + 1}), which skips the rest of the epoch"
            )
        logger.info("%s: epoch %d starts a new pass over all of them", added, position.epoch)
        return position.new_sequence()

    def _order(self, topology: Topology, shares: tuple[int, ...]) -> OrderSpec:
        saved = self._saved
        order = make_order_spec(self._options, topology, self._groups(), shares, self._digest_of_data())
        if saved is None:
            return order
        return replace(
            order,
            sources=saved.sources,
            opens_slowly=saved.opens_slowly,
            fitted=saved.fitted,
            multiple=saved.multiple,
        )

    def _order_by_options(self) -> OrderSpec:
        """The order of a run that begins with these options."""
        shares = shares_of(self.own_weights, [source.floor for source in self._options.sources])
        groups = self._groups_by_options()
        return make_order_spec(self._options, self.topology, groups, shares, self._digest_of_data())

    def _groups(self) -> int:
        return self._groups_by_options() if self._saved is None else self._saved.groups

    def _groups_by_options(self) -> int:
        """The number of sequences, without a state."""
        options, topology = self._options, self.topology
        return (options.order.groups or topology.nodes) if options.train else topology.world_size

    def _weighted_units(self, place: int) -> int:
        """Factor of a source's weight: 1, or its samples, or its shards."""
        if self._options.sources[place].per == "source":
            return 1
        return self._shard_sizes.units(self.topology, self._groups())[place]

    def epoch_samples(self) -> int | None:
        """Samples of an epoch by num_samples, or by sizes.json, which doesn't know of `repeat=`."""
        if self._options.num_samples is not None or self._options.repeat is not None:
            return self._options.num_samples
        if self._options.has_cells:
            return None
        return self.listed_samples()

    @property
    def _shard_sizes(self) -> ShardSizes:
        """Reads sizes.json, made at first use."""
        if self._sizes is None:
            from streamload.loader.sizes import ShardSizes

            self._sizes = ShardSizes(self._options, self._digest_of_data)
        return self._sizes

    def _read_sizes(self, groups: int | None = None) -> list[Sizes]:
        """The samples of each shard of each source, by sizes.json."""
        return self._shard_sizes.read(self.topology, groups or self._groups())

    def _digest_of_data(self) -> str:
        if self._data_digest is None:
            self._data_digest = data_digest(self._options)
        return self._data_digest
