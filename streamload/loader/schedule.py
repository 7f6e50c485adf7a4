"""A loader's epochs and steps: how long they are, in what order, and where the loader is among them (B to E).

The order is settled when it is first needed, not when a loader is made: torch.distributed may be set up in
between, and the number of samples may have to be read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamload.cache.forecast import Measure
from streamload.cache.shard import ShardList
from streamload.errors import OptionError, OrderDiverged, StateMismatch
from streamload.loader.distributed import can_compare, first_told
from streamload.loader.options import LoaderOptions
from streamload.loader.orders import data_digest, order_spec_of, orders_of, sizes_digest, split_of
from streamload.loader.position import (
    EpochTracker,
    OrderSpec,
    Position,
    Weights,
    check_fits,
    from_state,
    to_state,
)
from streamload.loader.sizes import listed_sizes
from streamload.loader.widths import fitted
from streamload.order.mixing import shares_of
from streamload.order.plan import OrderOptions
from streamload.order.split import Split
from streamload.topology import Topology, read_topology

logger = logging.getLogger("streamload")


class Schedule:
    """The epochs of one loader.

    Args:
        options: what it was asked for.

    Attributes:
        course: where it is.
    """

    def __init__(self, options: LoaderOptions):
        self.course = EpochTracker(options.goes_on)
        self._options = options
        self._settled: tuple[Topology, OrderSpec] | None = None
        self._saved: OrderSpec | None = None
        self._digest: str | None = None
        self._cut_by: str | None = None  # a digest of the sizes by which the groups are cut
        self._sizes: list[list[int] | None] | None = None

    @property
    def here(self) -> Topology:
        """This rank among those that share the data out."""
        options = self._options
        if not options.train and options.order.rank is None:
            return Topology()
        return read_topology(options.order.rank, options.order.world_size)

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None where the data alone knows, or there is no end."""
        options = self._options
        if options.num_batches is not None or options.order.endless:
            return options.num_batches
        number = self._samples()
        return None if number is None else self.batches_of(number)

    @property
    def is_one_pass(self) -> bool:
        """Whether an epoch is once through all data, read as one group."""
        options, here = self._options, self.here
        groups = (options.order.groups or here.nodes) if options.train else here.world_size
        return groups == 1 and not options.goes_on

    def batches_of(self, samples: int) -> int:
        """Batches of this rank in an epoch of so many samples over all ranks."""
        batch_size, here = self._options.batch_size, self.here
        if self._options.train:
            return max(1, samples // (batch_size * here.world_size))
        share = (here.rank + 1) * samples // here.world_size - here.rank * samples // here.world_size
        return -(-share // batch_size)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None where the data alone knows, or there is no end."""
        if not self._options.train:
            return self._samples()
        batches = self.num_batches
        return None if batches is None else batches * self._options.batch_size * self.here.world_size

    def settle(self) -> OrderSpec:
        """The order of the run, as this rank now stands among the others."""
        here = self.here
        if self._settled is None or self._settled[0] != here:
            if self.course.weights is None:
                self.course.weights = self.weights({})
            self._settled = here, self._order(here, self.course.weights.shares)
        return self._settled[1]

    @property
    def order(self) -> OrderSpec:
        """The order that was settled last."""
        return self.settle() if self._settled is None else self._settled[1]

    def fit(self, shards: ShardList, measure: Measure) -> None:
        """Settle lanes and window that weren't given by what the caches have room for, where a run begins.

        All ranks have to call it.
        """
        here, order = self.here, self.settle()
        if not order.fitted:
            order = fitted(order, self._options, here, shards, measure)
            self._settled = here, order

    def orders(self) -> list[OrderOptions]:
        """Of each source's own sequence.

        Raises:
            OrderDiverged: another rank found another sizes.json.
        """
        order = self.order
        sizes: list[list[int] | None] = self._listed() if order.groups > 1 else [None] * len(order.sources)
        self._compare(order)
        self._cut_by = sizes_digest(sizes) if order.groups > 1 else ""
        return orders_of(order, sizes)

    def split(self) -> Split:
        """How steps are dealt to ranks."""
        return split_of(self._options, self.here, self.order.groups)

    def steps(self, place: Position) -> int | None:
        """How many steps an epoch has from a place on; None: to the end of the pass, or without end.

        Raises:
            OptionError: nothing says how many, and the data can't.
        """
        options, order = self._options, self.order
        if not options.train or options.order.endless or not (options.goes_on or order.groups > 1):
            return None
        batches = self.num_batches
        if batches is None:
            what = "mixes several sources" if len(order.sources) > 1 else f"is on {order.groups} nodes"
            raise OptionError(
                f"a run that {what} has to know how long an epoch is: give num_samples or num_batches, put a "
                f"sizes.json beside the shards, or say endless=True"
            )
        batch = self.split().batch
        return max(0, place.began + batches * batch - place.position) // batch

    @property
    def shards(self) -> int:
        """How many shards this rank reads in a pass, about."""
        split, groups = self.split(), self.order.groups
        own = len(split.groups_of(self.here.rank if self._options.train else 0))
        return -(-len(self._options.urls) * own // groups)

    def state(self, counted: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Where this rank is, with what it has counted."""
        return to_state(replace(self.order, sizes=self._cut_by), self.course.now(), counted)

    def load(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], moved: Mapping[str, str]) -> None:
        """Go on from a state.

        Args:
            state: as it was saved.
            moved: where shards were then → where they are now.

        Raises:
            StateMismatch: it isn't of this run.
        """
        saved, place = from_state(state)
        here, ours = self.here, self.settle()
        if moved:
            ours, place = replace(ours, data=data_digest(self._options, moved)), place.moved()
        if saved.data != ours.data and self._is_extended(saved, moved):
            saved, place = replace(saved, data=ours.data, shards=ours.shards), self._with_more(saved, place)
        if place.position:
            ours = replace(ours, groups=saved.groups)
            if saved.groups > 1 and saved.sizes is not None:
                ours = replace(ours, sizes=sizes_digest(self._listed(saved.groups)))
        first, rank = (0, here.rank) if ours.train else (here.rank, 0)
        split = split_of(self._options, self.here, ours.groups)
        needed = {first + group for group in split.groups_of(rank)}
        check_fits(saved, ours, place, needed)
        self._refuse_other_options(saved, place)
        self._saved = saved if place.position else replace(saved, groups=ours.groups)
        self._cut_by = saved.sizes if place.position else None
        self._settled = None
        self.course.load(place)

    def weights(self, changed: Mapping[str, float]) -> Weights:
        """The weights of the sources, some of them changed.

        Args:
            changed: new ones by name.

        Raises:
            OptionError: weights that can't be, or of no source.
        """
        sources = self._options.sources
        if self.course.weights is None:
            last = tuple(source.weight * self._per(place) for place, source in enumerate(sources))
        else:
            last = self.course.weights.given
        weights = {source.name: weight for source, weight in zip(sources, last, strict=True)}
        unknown = sorted(changed.keys() - weights.keys())
        if unknown:
            raise OptionError(f"no source is named {', '.join(unknown)}; they are {', '.join(weights)}")
        given = tuple((weights | dict(changed)).values())
        return Weights(given, shares_of(given, [source.floor for source in sources]))

    def _order(self, here: Topology, shares: tuple[int, ...]) -> OrderSpec:
        options, saved = self._options, self._saved
        if self._digest is None:
            self._digest = data_digest(options)
        order = order_spec_of(options, here, self._groups(), shares, self._digest)
        if saved is None:
            return order
        return replace(order, sources=saved.sources, opens_after=saved.opens_after, fitted=saved.fitted)

    def _groups(self) -> int:
        """How many sequences there are."""
        if self._saved is not None:
            return self._saved.groups
        here = self.here
        return (self._options.order.groups or here.nodes) if self._options.train else here.world_size

    def _is_extended(self, saved: OrderSpec, moved: Mapping[str, str]) -> bool:
        """Whether the sources are those of a state, moved or not, with shards appended."""
        counts = [len(source.urls) for source in self._options.sources]
        return (
            len(saved.shards) == len(counts)
            and all(before <= now for before, now in zip(saved.shards, counts, strict=True))
            and data_digest(self._options, moved, saved.shards) == saved.data
        )

    def _with_more(self, saved: OrderSpec, place: Position) -> Position:
        """Where to go on over more shards than a state has.

        Raises:
            StateMismatch: in the middle of an epoch, which is over the shards that it began with.
        """
        now = sum(len(source.urls) for source in self._options.sources)
        said = f"{now - sum(saved.shards)} shards were appended to the {sum(saved.shards)} of the state"
        if place.position != place.began:
            raise StateMismatch(
                f"{said}, which is of the middle of epoch {place.epoch}: an epoch is over the shards that it "
                f"began with. Finish it with these and go on from the state after its end; or load no state "
                f"and call set_epoch({place.epoch + 1}), which leaves out the rest of the epoch"
            )
        logger.info("%s: epoch %d begins a new pass, over all of them", said, place.epoch)
        return place.anew()

    def _compare(self, order: OrderSpec) -> None:
        """See that all ranks found the same sizes.json, where the order follows from it.

        Raises:
            OrderDiverged: the first rank to look, by its own word, found another.
        """
        if order.groups == 1 and all(source.per == "source" for source in self._options.sources):
            return
        here, sizes = self.here, self._listed()
        counts = ", ".join(
            "none" if own is None else f"{len(own)} shards, {sum(own):,} samples" for own in sizes
        )
        own = f"rank {here.rank} found {counts} ({sizes_digest(sizes)})"
        first = first_told(f"sizes {order.data} {order.seed} {order.train}", own, here.world_size)
        if first.rpartition(" found ")[2] != own.rpartition(" found ")[2]:
            raise OrderDiverged(
                f"the ranks found different sizes.json files, by which samples are divided among them: "
                f"{first}, {own}. All nodes have to see the same file, or none"
            )

    def _refuse_other_options(self, saved: OrderSpec, place: Position) -> None:
        """Lanes, window and groups are the state's; whoever asks for others means another run.

        Raises:
            StateMismatch: others were asked for.
        """
        options, order = self._options, self._options.order
        kept = {"groups": (saved.groups, order.groups)} if place.position else {}
        if len(saved.sources) == 1:
            _, lanes, window = saved.sources[0]
            kept |= {"shuffle": (window, options.shuffle)} | (
                {"lanes": (lanes, order.lanes)} if window else {}
            )
        for name, (value, asked) in kept.items():
            if options.train and asked is not None and asked != value:
                raise StateMismatch(f"the state was saved with {name}={value}, and this is {asked}")

    def _per(self, place: int) -> int:
        """What a source's weight is multiplied with."""
        source = self._options.sources[place]
        if source.per == "source":
            return 1
        sizes = self._listed()
        return sum(sizes[place] or ()) if all(sizes) else len(source.urls)

    def _samples(self) -> int | None:
        """Samples of an epoch as they were given, or listed."""
        if self._options.num_samples is not None:
            return self._options.num_samples
        sizes = self._listed()
        return None if None in sizes else sum(sum(own or ()) for own in sizes)

    def _listed(self, groups: int | None = None) -> list[list[int] | None]:
        """Of each source the samples of each shard by sizes.json, read once.

        With more than one group no node may miss a file: what isn't a clear answer is an error, unless the
        ranks compare what they found.
        """
        if self._sizes is None:
            strict = (groups or self._groups()) > 1 and not can_compare(self.here.world_size)
            storage = dict(self._options.shards.storage_options or {}) or None
            self._sizes = [listed_sizes(source.urls, storage, strict) for source in self._options.sources]
        return self._sizes
