"""What a rank and its workers tell each other arrives as it was told."""

import pickle

import pytest

from streamload.order.group import Cursor
from streamload.order.lanes import LaneState
from streamload.worker.states import CheckpointShard, GroupState, OpenShards, SealedStates, SourceState


def state(position):
    lanes = LaneState(given=9, round=3, slot=1, next=4, lanes=((0, 3, 0), (-1, 0, 2)))
    cursor = Cursor(position, pass_=1, skip=5, lanes=lanes, done=((2, 40),))
    return GroupState(
        (0,), (SourceState(cursor, OpenShards.of({7: CheckpointShard(12, True, -1, 99, 12, 5)})),)
    )


def test_sealed_states_are_those_that_were_sealed_also_in_another_process():
    states = {3: state(100), 5: state(200)}
    sealed = SealedStates(states)
    for found in (sealed, pickle.loads(pickle.dumps(sealed))):
        assert found == states
        assert (len(found), list(found), found[5]) == (2, [3, 5], states[5])
        assert type(found[5].sources[0].cursor.lanes) is LaneState
        assert type(found[5].sources[0].begun[7]) is CheckpointShard
        with pytest.raises(KeyError):
            found[4]


def test_a_state_goes_through_json():
    told = state(100)
    assert GroupState.from_json(told.to_json()) == told
