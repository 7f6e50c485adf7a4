"""What a worker writes and its rank reads, without a copy on the way (step J).

All memory is anonymous shared files (memfd): nothing has a name, so nothing is left behind by a kill, and
the size of a container's /dev/shm is no limit. Batches lie in slots, which are used again once nobody has
them. The board is a small shared page that lasts as long as the loader: counters upwards, orders downwards.
"""

from streamload.handoff.board import Board
from streamload.handoff.channels import context_with_channels
from streamload.handoff.memory import own_empty, shared_empty
from streamload.handoff.slots import Slots, is_plain, slots_for

__all__ = ["Board", "Slots", "context_with_channels", "is_plain", "own_empty", "shared_empty", "slots_for"]
