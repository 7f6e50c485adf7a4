"""Worker → rank without copies (step J): a pool of buffers for batches, queues, and a control block.

All memory is anonymous shared files (memfd): nothing has a name, so a kill leaves nothing behind, and a
container's /dev/shm is no limit. The control block lives as long as the loader: commands down, counters up.
"""

from streamload.ipc.control import ControlBlock, Numbers, spent_ns
from streamload.ipc.shared_memory import is_plain, own_empty, shared_empty

__all__ = [
    "ControlBlock",
    "Numbers",
    "is_plain",
    "own_empty",
    "shared_empty",
    "spent_ns",
]
