"""What a worker writes and its rank reads, without a copy on the way (step J).

All memory is anonymous shared files (memfd): nothing has a name, so nothing is left behind by a kill, and
the size of a container's /dev/shm is no limit. Batches lie in buffers, which are used again once nobody has
them. The control block is a small shared page that lasts as long as the loader: commands down, counters up.
"""

from streamload.ipc.buffers import BufferPool, buffers_for, is_plain, own_empty, shared_empty
from streamload.ipc.control import ControlBlock
from streamload.ipc.queues import context_with_queues

__all__ = [
    "BufferPool",
    "ControlBlock",
    "buffers_for",
    "context_with_queues",
    "is_plain",
    "own_empty",
    "shared_empty",
]
