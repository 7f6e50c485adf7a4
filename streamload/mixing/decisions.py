"""Mixing: weights that steer themselves by what ranks report, decisions, and the log of them (step K).

At a decision step the reports of all ranks go to the policy on rank 0, whose answer all of them take. It
counts from a number of steps later that is the same on every layout, and workers begin none of these before
it is made. So batches depend on reports and policy, never on workers, speed, or where a run was resumed.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamload.errors import DataError, OptionError, OrderDiverged, OriginError, PolicyError
from streamload.extension import Event, Extension, RankPart, RecordedEvents, WorkerPart
from streamload.mixing.log import RunLog
from streamload.mixing.reports import (
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
from streamload.mixing.state import REPORTS, SteeringState
from streamload.order.events import BATCH_SIZE, UNIT, WEIGHTS, new_weights, shares_of
from streamload.steering import Decided, Policy, SourceSummary, Summary, weights_of
from streamload.steering.decisions import described
from streamload.steering.policy import FunctionPolicy, kept_memory, loss_weights_of
from streamload.steering.replay import Replay
from streamload.steering.summary import PARTS

if TYPE_CHECKING:
    from streamload.extension import Batch, BatchInfo, LoaderOptions, Run, WorkerProcess

logger = logging.getLogger("streamload")

DELAY_STEPS = 64
"""A decision counts from so many steps after it, or from the next decision step if that comes first."""


@dataclass(frozen=True, slots=True)
class Mixing(Extension):
    """The extension of a loader whose weights are decided on, logged, replayed, or told from an objective.

    Attributes:
        every: steps from one decision to the next; 0: none is made.
    """

    every: int

    name = "mixing"

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse to decide on, weigh or write what an evaluation doesn't have, or a replay has already.

        Raises:
            OptionError: it says which option.
        """
        order = options.order
        values = {"mixing": options.mixing, "decisions": order.decisions, "objective": order.objective}
        for name, value in values.items():
            if value is not None and not options.train:
                raise OptionError(f"{name}= is for training: an evaluation yields each sample once")
        if isinstance(options.mixing, Replay) and order.decisions is not None:
            raise OptionError(f"leave out decisions=: {options.mixing!r} has all decisions")

    def in_worker(self, process: WorkerProcess) -> DecisionWait | None:
        """Wait for decisions, where there are any."""
        return DecisionWait(process, self.every) if self.every else None

    def in_rank(self, run: Run) -> Decisions:
        """Decide, log or replay."""
        return Decisions(run, self.every)


def delay_steps(every: int) -> int:
    """The steps after which a decision counts."""
    return min(DELAY_STEPS, every)


class DecisionWait(WorkerPart):
    """Mixing in a worker: begins a step once the decisions are made that it may depend on.

    Args:
        process: of the worker.
        every: see Mixing.
    """

    def __init__(self, process: WorkerProcess, every: int):
        self._process, self._every = process, every
        self._steps = 0

    def apply(self, event: Event) -> None:
        """Take how many steps the run has had at the start of the epoch."""
        self._steps = event.value

    def may_begin(self, number: int) -> bool:
        """True if the last decision was made that counts by then."""
        before = max(0, self._steps + number - delay_steps(self._every))
        return self._process.decided >= before // self._every * self._every


class _InfoFields(NamedTuple):
    """Fields of a batch's info that follow from decisions; see BatchInfo."""

    run_step: int
    source_weights: tuple[float, ...] | None = None
    importance: tuple[float, ...] | None = None
    loss_weight: tuple[float, ...] | None = None


class Decisions(RankPart):
    """Mixing in the rank.

    Args:
        run: of the loader.
        every: see Mixing.
    """

    by_rank = (REPORTS,)

    def __init__(self, run: Run, every: int):
        options = run.options
        self._run, self._options = run, options
        mixing = options.mixing
        self._policy: Policy | None = None if isinstance(mixing, Replay) else mixing
        self._every = every
        self.takes_reports = self._policy is not None
        self.reported: list[dict[str, Any]] = []  # what the last decision was made from (`described`)
        if isinstance(mixing, Replay):
            run.replay(RecordedEvents(mixing.base_batch, mixing.events))
        self._cause: Exception | None = None
        self._objective = _objective(options)
        self._fields = _InfoFields(0)
        self._fields_of: object = None  # the shares and weights in the loss by which these are
        self._restore(SteeringState.at_start(len(options.sources)))

    def _restore(self, state: SteeringState) -> None:
        self._state, self._reports = state, Reports(len(self._options.sources))
        self._steps, self._handed = state.steps, list(state.handed)
        self._loss_weights = state.loss_weights
        self._passes, self._sizes = [0] * len(state.total), dict(state.sizes)
        self._log: RunLog | None = None
        if self._options.order.decisions is not None:
            decided_by = {"policy": self._policy_name, "every": self._every}
            self._log = RunLog(self._options.order.decisions, self._run, decided_by, state.log)

    # In the course of an epoch.

    def start_epoch(self, start: int) -> Sequence[Event]:
        """Open the log; the workers get the number of steps of the run so far.

        Raises:
            OptionError: nothing joins the ranks; the log can't be written.
            DecisionsError: the log to replay is of another run.
        """
        if isinstance(self._options.mixing, Replay):
            self._options.mixing.check_run(self._run.identity)
            self._options.mixing.check_ranks(self._run.world_size)
        if self._policy is not None:
            self._run.join()
        if self._log is not None:
            self._log.begin_epoch(self._run.next_epoch, self._steps, self._loss_weights)
        self._run.decided(self._steps - self._is_due)
        return [Event(start, Mixing.name, self._steps)]

    def taken(self, batch: Batch) -> None:
        """Count what each source has given, by the shares of the step."""
        shares, samples = self._run.position.shares, batch.step.stop - batch.step.position
        for source, share in enumerate(shares):
            self._handed[source] += share * samples
        for source, pass_ in enumerate(batch.rows.passes):
            if pass_ > self._passes[source]:
                self._passes[source] = pass_
                size = (self._state.total[source] + self._handed[source]) / UNIT / pass_
                self._sizes[str(source)] = min(size, self._sizes.get(str(source), size))
        if isinstance(self._options.mixing, Replay):
            self._loss_weights = self._options.mixing.loss_weights(self._steps)
        if self._fields_of != (shares, self._loss_weights):
            floors = [source.floor for source in self._options.sources]
            initial = shares_of(self._run.own_weights, floors)
            weights = None if self._objective is None else _ratios(self._objective, shares)
            importance = None if initial == shares else _ratios(initial, shares)
            if self._loss_weights is not None:
                ratios = weights or (1.0,) * len(shares)
                weights = tuple(map(operator.mul, ratios, self._loss_weights))
            self._fields = _InfoFields(0, weights, importance, self._loss_weights)
            self._fields_of = shares, self._loss_weights
        self._fields = self._fields._replace(run_step=self._steps)
        self._steps += 1

    def yielded(self, part: bytes, values: Mapping[str, Any]) -> dict[str, Any]:
        """The number of the step in the run, and what its shares mean for the weights of rows."""
        return self._fields._asdict()

    def report(self, values: Mapping[str, Any], info: BatchInfo, rows: Rows | None) -> None:
        """Add reports to those since the last decision."""
        if self._policy is None:
            return
        step = self._steps - 1 if info.run_step is None else info.run_step
        part = min(PARTS - 1, max(0, step - self._state.decided) * PARTS // self._every)
        for name, line in (("loss", LOSS + part), ("alignment", ALIGNMENT), ("tokens", TOKENS)):
            if values[name] is not None:
                self._reports.add(line, values[name], info, rows)

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """Keep the last losses on held-out data for the next decision."""
        names = [source.name for source in self._options.sources]
        if self._policy is not None:
            for name, value in values.items():
                is_tensor = isinstance(value, torch.Tensor)
                self._reports.evaluations[names.index(name)] = value.detach() if is_tensor else float(value)

    # Decisions.

    @property
    def _is_due(self) -> bool:
        return bool(self._every and self._steps % self._every == 0 and self._steps > self._state.decided)

    def before_batch(self) -> None:
        """Decide, if this step is a decision step.

        Raises:
            PolicyError: the policy raised an error, or its answer can't be used; on all ranks.
            OriginError: a sizes.json can't be read; on all ranks.
            RankFailed: another rank failed or ended.
            OrderDiverged: another rank is at another step.
        """
        if not self._is_due:
            return
        reports = {rank: reported.to_json() for rank, reported in self._reports_so_far().items()}
        subject = f"the weights at step {self._steps} of the run"
        answer = self._run.agree(subject, [self._steps, reports], self._answered)
        if "diverged" in answer:
            raise OrderDiverged(answer["diverged"])
        if "unread" in answer:
            raise OriginError(answer["unread"]) from self._cause
        if "error" in answer:
            raise PolicyError(answer["error"]) from self._cause
        shares, total = answer["shares"], self._total
        decided = None
        if shares is not None:
            weights = new_weights(0, shares, answer["weights"])
            decided = self._run.add_weights(weights, delay_steps(self._every))
        self._state = replace(
            self._state, decided=self._steps, total=total, policy=self._policy_name, memory=answer["memory"],
            ranks=(), reports={}, sizes=answer["sizes"],
        )  # fmt: skip
        self._sizes = dict(answer["sizes"])
        self.reported = answer["told"]["sources"]
        if answer["told"].get("loss_weights"):
            self._loss_weights = tuple(answer["told"]["loss_weights"])
        if self._loss_weights is not None:
            weighed = zip(self.reported, self._loss_weights, strict=True)
            self.reported = [{**source, "loss_weight": weight} for source, weight in weighed]
        self._handed = [0] * len(total)
        self._reports.clear()
        self._run.decided(self._steps)
        if self._log is not None:
            self._log.record(self._steps, decided, answer["told"])

    def _answered(self, by_rank: list[Any]) -> dict[str, Any]:
        """On rank 0, the policy's answer for all ranks, or why there is none."""
        steps = [step for step, _ in by_rank]
        if len(set(steps)) > 1:
            return {"diverged": f"the ranks are not at the same step of the run: by rank, {steps[:16]}"}
        try:  # here, as the policy isn't their cause
            for place in range(len(self._options.sources)):
                self._run.source_samples(place)
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
        reasons: dict[str, Any] = {
            "reason": " ".join(str(decided.reason).split())[:500],
            "sources": described(summary),
        }
        if (loss_weights := loss_weights_of(decided, summary)) is not None:
            reasons["loss_weights"] = loss_weights
        answer = {
            "weights": decided_weights,
            "shares": shares,
            "memory": kept_memory(decided.memory),
            "told": reasons,
        }
        return {**answer, "sizes": reported.sizes}

    def _summary(self, reported: Reported) -> Summary:
        run, sources = self._run, []
        weights, shares = run.weights, run.position.shares
        for place, source in enumerate(self._options.sources):
            total, sums = self._total[place] / UNIT, reported.sums
            size = run.source_samples(place) or reported.sizes.get(str(place))
            sources.append(
                SourceSummary(
                    source.name,
                    weights[place],
                    shares[place] / UNIT,
                    source.floor,
                    round(self._handed[place] / UNIT),
                    round(total),
                    None if size is None else total / max(1.0, size),
                    tuple(signal_of(sums, LOSS + part, place) for part in range(PARTS)),
                    signal_of(sums, ALIGNMENT, place),
                    reported.evaluations.get(str(place)),
                    bad_of(sums, place),
                    signal_of(sums, TOKENS, place),
                    1.0 if self._loss_weights is None else self._loss_weights[place],
                    source.modality,
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
        return (*self._state.ranks, self._run.world_size)

    def _reports_so_far(self) -> dict[str, Reported]:
        """Reports since the last decision, on this rank, and before the last resume on others."""
        reported = Reported(self._reports.read(), self._reports.read_evaluations(), dict(self._sizes))
        return {**self._state.reports, f"{len(self._state.ranks)}.{self._run.rank}": reported}

    def state(self, position: int) -> dict[str, Any]:
        """The parts of a loader's state."""
        log = None if self._log is None else self._log.state
        state = replace(
            self._state,
            steps=self._steps,
            handed=tuple(self._handed),
            log=log,
            loss_weights=self._loss_weights,
        )
        if self._policy is not None:
            state = replace(state, ranks=self._ranks, reports=self._reports_so_far())
        return state.to_json()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on after what a state has of decisions."""
        sources = len(self._options.sources)
        saved = SteeringState.from_json(state, sources) or SteeringState.at_start(sources)
        if self._policy is not None and saved.policy not in ("", self._policy_name):
            logger.info("the state was decided by %s: %s begins anew", saved.policy, self._policy_name)
            saved = replace(saved, policy="", memory=None)
        self._restore(saved)

    def gathered(self, state: Mapping[str, Any], position: int) -> dict[str, Any]:
        """The parts of the state of all ranks, with their reports in one."""
        saved = SteeringState.from_json(state, len(self._options.sources))
        return {} if saved is None else saved.collapsed().to_json()

    def event_set(self, event: Event, reason: Mapping[str, Any]) -> None:
        """Log weights or a batch size that were set."""
        if self._log is not None and event.kind in (WEIGHTS, BATCH_SIZE):
            self._log.record(self._steps, event, reason)


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
