"""The contract of a policy: `every` and `decide`, a pure function of a summary and of its own memory.

Plain functions are adapted, and what a policy returns is checked, before it becomes shares of samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from streamload.errors import OptionError
from streamload.steering.summary import Summary

FUNCTION_EVERY = 200
"""The steps between two decisions of a plain function."""
_MEMORY_BYTES = 64 << 10
_MOST_WEIGHT = 1e30
"""Weights are float32 in batches."""


class Decided(NamedTuple):
    """The answer of a policy.

    Attributes:
        weights: by the sources' names, in the scale of the summary's weights; a source that isn't named keeps
            its weight. None: no change.
        memory: handed in again at the next decision. JSON-able, a few KB at most: it is part of the state.
        reason: one line for the log of decisions.
        loss_weights: of rows in the loss, from the next batch on: by the sources' names or by modality
            ("image-text", "text", "image"), a name before its modality; what isn't named keeps its own.
            None: no change.
    """

    weights: Mapping[str, float] | None
    memory: Any = None
    reason: str = ""
    loss_weights: Mapping[str, float] | None = None


@runtime_checkable
class Policy(Protocol):
    """Decides weights. The same summary and memory give the same answer, and nothing else counts.

    Attributes:
        every: a decision is made at each step of the run that this number divides.
    """

    @property
    def every(self) -> int:
        """The steps from one decision to the next."""
        ...

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return the weights from now on, and what to remember; `memory` is None at the first decision."""
        ...


PlainFunction = Callable[[Summary], Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """A plain function of the summary as a policy without memory."""

    function: PlainFunction
    every: int = FUNCTION_EVERY

    def decide(self, summary: Summary, memory: Any) -> Decided:
        """Return what the function returns."""
        weights = self.function(summary)
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return Decided(weights, None, "no change" if weights is None else name)


def as_policy(policy: Policy | PlainFunction, names: Sequence[str] | None = None) -> Policy:
    """Return a policy as it is, and a plain function as a policy that is asked every 200 steps.

    Args:
        policy: the policy or function.
        names: of the run's sources, if known: a policy whose `names` has others is refused.

    Raises:
        OptionError: it is neither, its `every` isn't a positive whole number, or it names unknown sources.
    """
    unknown = sorted(set(getattr(policy, "names", ())) - set(names)) if names is not None else []
    if unknown:
        raise OptionError(f"mixing= names the source {unknown[0]!r}; there are: {', '.join(names or ())}")
    if isinstance(policy, type):
        raise OptionError(f"mixing={policy.__name__} is a class; give an object: {policy.__name__}(…)")
    if isinstance(policy, Policy):
        every = policy.every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise OptionError(
                f"{type(policy).__name__}.every is {every!r}; expected a number of steps from 1"
            )
        return policy
    if callable(policy):
        return FunctionPolicy(policy)
    raise OptionError(
        f"mixing={policy!r}; expected Progress(), Schedule({{step: weights}}), Target(reference), "
        f"TokenShares(), a function of a Summary, or an object with `every` and `decide`"
    )


def weights_of(decided: Decided, summary: Summary) -> tuple[float, ...] | None:
    """Return the weight of each source in the order of the summary; None if nothing changes.

    Raises:
        OptionError: an unknown source, a weight that is negative or not a number, or only zero weights.
    """
    if decided.weights is None:
        return None
    _check_weights(decided.weights, [source.name for source in summary.sources], "weight")
    weights = tuple(float(decided.weights.get(source.name, source.weight)) for source in summary.sources)
    if not any(weights):
        raise OptionError("the policy gave every source the weight 0, which leaves nothing to read")
    return weights


def loss_weights_of(decided: Decided, summary: Summary) -> tuple[float, ...] | None:
    """Return the weight in the loss of each source in the order of the summary; None if nothing changes.

    Raises:
        OptionError: neither a source nor a modality of one, or a weight that is negative or not a number.
    """
    by_name, sources = decided.loss_weights, summary.sources
    if by_name is None:
        return None
    names = dict.fromkeys([source.name for source in sources] + [source.modality for source in sources])
    _check_weights(by_name, list(names), "loss weight")
    return tuple(
        float(by_name.get(source.name, by_name.get(source.modality, source.loss_weight)))
        for source in sources
    )


def _check_weights(weights: Any, names: Sequence[str], kind: str) -> None:
    if not isinstance(weights, Mapping):
        raise OptionError(f"the policy gave {kind}s {weights!r:.100}; expected a dict by {', '.join(names)}")
    for name, weight in weights.items():
        if name not in names:
            raise OptionError(f"the policy gave a {kind} to {name!r}, and the sources are {', '.join(names)}")
        if not hasattr(weight, "__float__") or not 0 <= float(weight) <= _MOST_WEIGHT:
            raise OptionError(
                f"the policy gave {name!r} the {kind} {weight!r}; expected a number from 0 to 1e+30"
            )


def kept_memory(memory: Any) -> Any:
    """Return a policy's memory as it comes out of a state.

    Raises:
        OptionError: it isn't JSON-able, or too large.
    """
    try:
        text = json.dumps(memory, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise OptionError(f"its memory can't be part of a state: {exc}") from exc
    if len(text) > _MEMORY_BYTES:
        raise OptionError(f"its memory of {len(text):,} bytes is too large for a state ({_MEMORY_BYTES:,})")
    return json.loads(text)
