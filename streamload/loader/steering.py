"""Weights that steer themselves: what ranks report, decisions, and the log of them (step K).

At a decision step the reports of all ranks go to the policy on rank 0, whose answer all of them take. It
counts from a number of steps later that is the same on every layout, and workers begin none of these before
it is made. So batches depend on reports and policy, never on workers, speed, or where a run was resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from streamload.errors import DataError, OptionError, OrderDiverged, OriginError, PolicyError
from streamload.ipc import ControlBlock
from streamload.loader.agreement import Agreement
from streamload.loader.batch_info import BatchInfo
from streamload.loader.changes import Changes
from streamload.loader.epoch import Epoch
from streamload.loader.options import LoaderOptions
from streamload.loader.position import Position, Weights
from streamload.loader.reported_means import ReportedMeans
from streamload.loader.run_log import RunLog
from streamload.loader.schedule import Schedule
from streamload.loader.signals import (
    ALIGNMENT,
    LOSS,
    TOKENS,
    Reported,
    Reports,
    Rows,
    bad_of,
    merged,
    signal_of,
)
from streamload.loader.steering_state import SteeringState
from streamload.order.mixing import UNIT, shares_of
from streamload.steering import Decided, Policy, SourceSummary, Summary, weights_of
from streamload.steering.decisions import described
from streamload.steering.policy import FunctionPolicy, kept_memory
from streamload.steering.replay import Replay
from streamload.steering.summary import PARTS
from streamload.worker import Batch

logger = logging.getLogger("streamload")

DELAY_STEPS = 64
"""A decision counts from so many steps after it, or from the next decision step if that comes first."""


class Steered(NamedTuple):
    """Part of decisions that is of a batch.

    Attributes:
        run_step: its number in the run, from 0; None: steps aren't counted.
        source_weights: of the rows of each source; None: 1.
        importance: the sources' own shares ÷ those of the batch; None: they are the same.
    """

    run_step: int | None = None
    source_weights: tuple[float, ...] | None = None
    importance: tuple[float, ...] | None = None


class Steering:
    """The decisions of a loader.

    Args:
        options: of the loader.
        schedule: of its epochs.

    Attributes:
        seen: what the last decision was made from, by source, over all ranks (`described`); without a policy,
            the means of this rank's reports.
    """

    def __init__(self, options: LoaderOptions, schedule: Schedule):
        self.seen: list[dict[str, Any]] = []
        mixing, order = options.mixing, options.order
        self._options, self._schedule = options, schedule
        self._policy: Policy | None = None if isinstance(mixing, Replay) else mixing
        self._every = 0 if self._policy is None else self._policy.every
        self._is_active = mixing is not None or order.decisions is not None or order.objective is not None
        if isinstance(mixing, Replay):
            schedule.tracker.replayed = mixing
        self._cause: Exception | None = None
        self._agreement: Agreement | None = None
        self._objective = _objective(options)
        self._by_shares: tuple[tuple[int, ...], Steered] = (), Steered()
        self._restore(SteeringState.at_start(len(options.sources)))

    def _restore(self, state: SteeringState) -> None:
        self._state, self._reports = state, Reports(len(self._options.sources))
        self._means = ReportedMeans([source.name for source in self._options.sources])
        self._steps, self._handed = state.steps, list(state.handed)
        self._passes, self._sizes = [0] * len(state.total), dict(state.sizes)
        self._log: RunLog | None = None
        if self._options.order.decisions is not None:
            decided_by = {"policy": self._policy_name, "every": self._every}
            self._log = RunLog(self._options.order.decisions, self._schedule, decided_by, state.log)

    # In the course of an epoch.

    def start_epoch(self, position: Position, control: ControlBlock) -> tuple[int, int, int]:
        """Before the workers start: open the log, and find which steps wait for a decision.

        Returns:
            For EpochStart.decisions.

        Raises:
            OptionError: nothing joins the ranks; the log can't be written.
            DecisionsError: the log to replay is of another run.
        """
        if not self._is_active:
            return 0, 0, 0
        if isinstance(self._options.mixing, Replay):
            self._options.mixing.check_run(self._schedule.identity())
            self._options.mixing.check_ranks(self._schedule.topology.world_size)
        if self._policy is not None and self._agreement is None:
            self._agreement = Agreement(self._schedule.topology.world_size)
        if self._log is not None:
            self._log.begin_epoch(position, self._steps)
        control.decided = self._steps - self._is_due
        return self._steps, self._every, self._delay

    def advance(self, batch: Batch) -> Steered:
        """The next step is taken; its shares are those of the tracker's position."""
        if not self._is_active:
            return Steered()
        shares, samples = self._schedule.tracker.shares, batch.stop - batch.position
        for source, share in enumerate(shares):
            self._handed[source] += share * samples
        for source, pass_ in enumerate(batch.passes):
            if pass_ > self._passes[source]:
                self._passes[source] = pass_
                size = (self._state.total[source] + self._handed[source]) / UNIT / pass_
                self._sizes[str(source)] = min(size, self._sizes.get(str(source), size))
        self._steps += 1
        if self._by_shares[0] != shares:
            floors = [source.floor for source in self._options.sources]
            initial = shares_of(self._schedule.own_weights, floors)
            weights = None if self._objective is None else _ratios(self._objective, shares)
            importance = None if initial == shares else _ratios(initial, shares)
            self._by_shares = shares, Steered(None, weights, importance)
        return self._by_shares[1]._replace(run_step=self._steps - 1)

    def report(self, loss: Any, alignment: Any, tokens: Any, info: BatchInfo, rows: Rows | None) -> None:
        """See Loader.report."""
        if self._policy is None:
            self._means.add(loss, alignment, info, rows)
            return
        if loss is not None:
            step = self._steps - 1 if info.run_step is None else info.run_step
            part = min(PARTS - 1, max(0, step - self._state.decided) * PARTS // self._every)
            self._reports.add(LOSS + part, loss, info, rows)
        if alignment is not None:
            self._reports.add(ALIGNMENT, alignment, info, rows)
        if tokens is not None:
            self._reports.add(TOKENS, tokens, info, rows)

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """See Loader.report_eval."""
        names = [source.name for source in self._options.sources]
        unknown = sorted(values.keys() - set(names))
        if unknown:
            raise OptionError(f"no source is named {', '.join(unknown)}; they are {', '.join(names)}")
        if self._policy is not None:
            for name, value in values.items():
                is_tensor = isinstance(value, torch.Tensor)
                self._reports.evaluations[names.index(name)] = value.detach() if is_tensor else float(value)

    # Decisions.

    @property
    def _is_due(self) -> bool:
        return bool(self._every and self._steps % self._every == 0 and self._steps > self._state.decided)

    @property
    def _delay(self) -> int:
        return min(DELAY_STEPS, self._every)

    def decide(self, control: ControlBlock, epoch: Epoch | None) -> None:
        """Before a batch is waited for: decide, if this step is a decision step.

        Raises:
            PolicyError: the policy raised an error, or its answer can't be used; on all ranks.
            OriginError: a sizes.json can't be read; on all ranks.
            RankFailed: another rank failed or ended.
            OrderDiverged: another rank is at another step.
        """
        if self._policy is None:
            self.seen = self._means.look() or self.seen
        if not self._is_due:
            return
        assert self._agreement is not None
        reports = {rank: reported.to_json() for rank, reported in self._reports_so_far().items()}
        subject = f"the weights at step {self._steps} of the run"
        answer = self._agreement.decide(subject, [self._steps, reports], self._answered)
        if "diverged" in answer:
            raise OrderDiverged(answer["diverged"])
        if "unread" in answer:
            raise OriginError(answer["unread"]) from self._cause
        if "error" in answer:
            raise PolicyError(answer["error"]) from self._cause
        shares, total = answer["shares"], self._total
        if shares is not None:
            Changes(self._schedule, control, epoch).apply(
                Weights(tuple(answer["weights"]), tuple(shares)), self._delay
            )
        self._state = replace(
            self._state, decided=self._steps, total=total, policy=self._policy_name, memory=answer["memory"],
            ranks=(), reports={}, sizes=answer["sizes"],
        )  # fmt: skip
        self._sizes = dict(answer["sizes"])
        self.seen = answer["told"]["sources"]
        self._handed = [0] * len(total)
        self._reports.clear()
        control.decided = self._steps
        if self._log is not None:
            self._log.record(self._steps, answer["weights"], shares, answer["told"])

    def _answered(self, by_rank: list[Any]) -> dict[str, Any]:
        """On rank 0, the policy's answer for all ranks, or why there is none."""
        steps = [step for step, _ in by_rank]
        if len(set(steps)) > 1:
            return {"diverged": f"the ranks are not at the same step of the run: by rank, {steps[:16]}"}
        try:  # here, as the policy isn't their cause
            for place in range(len(self._options.sources)):
                self._schedule.source_samples(place)
        except (OSError, DataError) as exc:
            self._cause = exc
            return {"unread": f"how many samples a source has can't be read: {exc}"}
        try:
            return self._ask(by_rank)
        except Exception as exc:
            self._cause = exc
            problem = str(exc) if isinstance(exc, OptionError) else f"{type(exc).__name__}: {exc}"
            return {"error": f"mixing={self._policy_name}, at step {self._steps} of the run: {problem}"}

    def _ask(self, by_rank: list[Any]) -> dict[str, Any]:
        """The policy's answer, as JSON-able values.

        Raises:
            OptionError: it can't be used.
        """
        assert self._policy is not None
        sources = self._options.sources
        reports = {
            name: Reported.from_json(reported, len(sources))
            for _, of_rank in by_rank
            for name, reported in of_rank.items()
        }
        if lacking := replace(self._state, ranks=self._ranks, reports=reports).lacking:
            logger.warning(
                "the reports of %d ranks from before the resume aren't in its state: save "
                "streamload.gather_state(loader) to decide as without the cut",
                lacking,
            )
        reported = merged(list(reports.values()), len(sources))
        summary = self._summary(reported)
        decided = self._policy.decide(summary, self._state.memory)
        if not isinstance(decided, Decided):
            raise OptionError(
                f"decide() returned a {type(decided).__name__}; expected a streamload.mixing.Decided"
            )
        decided_weights = weights_of(decided, summary)
        shares = (
            None
            if decided_weights is None
            else shares_of(decided_weights, [source.floor for source in sources])
        )
        told = {"reason": " ".join(str(decided.reason).split())[:500], "sources": described(summary)}
        answer = {
            "weights": decided_weights,
            "shares": shares,
            "memory": kept_memory(decided.memory),
            "told": told,
        }
        return {**answer, "sizes": reported.sizes}

    def _summary(self, reported: Reported) -> Summary:
        schedule, sources = self._schedule, []
        weights = schedule.weights({}).given
        for place, source in enumerate(self._options.sources):
            total, sums = self._total[place] / UNIT, reported.sums
            size = schedule.source_samples(place) or reported.sizes.get(str(place))
            sources.append(
                SourceSummary(
                    source.name,
                    weights[place],
                    schedule.tracker.shares[place] / UNIT,
                    source.floor,
                    round(self._handed[place] / UNIT),
                    round(total),
                    None if size is None else total / max(1.0, size),
                    tuple(signal_of(sums, LOSS + part, place) for part in range(PARTS)),
                    signal_of(sums, ALIGNMENT, place),
                    reported.evaluations.get(str(place)),
                    bad_of(sums, place),
                    signal_of(sums, TOKENS, place),
                )
            )
        return Summary(self._steps, None, tuple(sources))

    @property
    def _policy_name(self) -> str:
        policy = self._policy
        if isinstance(policy, FunctionPolicy):
            return getattr(policy.function, "__name__", "function")
        return type(policy).__name__

    @property
    def _total(self) -> tuple[int, ...]:
        """Samples of each source that were handed out since the run began: samples × UNIT."""
        return tuple(before + new for before, new in zip(self._state.total, self._handed, strict=True))

    # States, and the log.

    @property
    def _ranks(self) -> tuple[int, ...]:
        return (*self._state.ranks, self._schedule.topology.world_size)

    def _reports_so_far(self) -> dict[str, Reported]:
        """Reports since the last decision, on this rank, and before the last resume on others."""
        reported = Reported(self._reports.read(), self._reports.read_evaluations(), dict(self._sizes))
        return {**self._state.reports, f"{len(self._state.ranks)}.{self._schedule.topology.rank}": reported}

    def state(self) -> dict[str, Any]:
        """The parts of a loader's state."""
        if not self._is_active:
            return {}
        log = None if self._log is None else self._log.state
        state = replace(self._state, steps=self._steps, handed=tuple(self._handed), log=log)
        if self._policy is not None:
            state = replace(state, ranks=self._ranks, reports=self._reports_so_far())
        return state.to_json()

    def load(self, state: SteeringState | None) -> None:
        """Go on after what a state has of decisions; None: nothing."""
        if not self._is_active or state is None:
            state = SteeringState.at_start(len(self._options.sources))
        elif self._policy is not None and state.policy not in ("", self._policy_name):
            logger.info("the state was decided by %s: %s begins anew", state.policy, self._policy_name)
            state = replace(state, policy="", memory=None)
        self._restore(state)

    def record_weights(self) -> None:
        """Log weights that the training has set."""
        weights = self._schedule.tracker.weights
        if weights is not None and self._log is not None:
            self._log.record(self._steps, weights.given, weights.shares, {"reason": "set_weights"})

    def record_size(self, told: Mapping[str, Any]) -> None:
        """Log a batch size that was set.

        Args:
            told: why, JSON-able.
        """
        sizes = self._schedule.tracker.sizes
        if sizes is not None and self._log is not None:
            self._log.record_size(self._steps, sizes.last, told)

    def refuse_changes(self, call: str) -> None:
        """Refuse other weights and sizes than those of a log that is replayed.

        Raises:
            OptionError: one is.
        """
        if isinstance(self._options.mixing, Replay):
            raise OptionError(f"mixing={self._options.mixing!r} has all decisions: leave out {call}")


def _ratios(shares_in_loss: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    return tuple(
        numerator / share if share else 0.0 for numerator, share in zip(shares_in_loss, shares, strict=True)
    )


def _objective(options: LoaderOptions) -> tuple[float, ...] | None:
    """The shares of the sources in the objective, in UNITs; None: it is that of the samples."""
    if options.order.objective is None:
        return None
    weights = {source.name: source.weight for source in options.sources}
    unknown = sorted(options.order.objective.keys() - weights.keys())
    if unknown:
        raise OptionError(f"objective= names {', '.join(unknown)}; the sources are {', '.join(weights)}")
    all_weights = tuple((weights | dict(options.order.objective)).values())
    return tuple(float(share) for share in shares_of(all_weights, [0.0] * len(all_weights)))
