"""Reads files for origins/local.py in a process of its own, which is abandoned if a file system holds it up.

Run by its path, so it imports nothing of the package. A request is a line on standard input: `open` and a
path in hex, `read`, a position and a number of bytes, `look`, or `close`. All but `close` are answered on
standard output by four numbers of 8 bytes, little-endian: an errno or 0, the size of the open file, its
mtime_ns, and the number of bytes that follow.
"""

import errno
import os
import stat
import sys


def serve() -> None:
    """Answer requests until standard input ends."""
    file = -1
    for line in sys.stdin.buffer:
        verb, *words = line.split()
        code, size, mtime_ns, data = 0, 0, 0, b""
        try:
            if verb in (b"open", b"close") and file >= 0:
                file, before = -1, file
                os.close(before)
            if verb == b"open":
                path = bytes.fromhex(words[0].decode())
                file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if verb == b"read":
                data = os.pread(file, int(words[1]), int(words[0]))
            elif verb != b"close":
                status = os.fstat(file)
                size, mtime_ns = status.st_size, status.st_mtime_ns
                code = 0 if stat.S_ISREG(status.st_mode) else errno.EINVAL
        except OSError as exc:
            code = exc.errno or errno.EIO
        numbers = (number.to_bytes(8, "little", signed=True) for number in (code, size, mtime_ns, len(data)))
        answer = memoryview(b"".join((*numbers, data)) if verb != b"close" else b"")
        while answer:
            answer = answer[os.write(1, answer) :]


if __name__ == "__main__":
    try:
        serve()
    except BrokenPipeError:  # the process that asks has ended
        os._exit(0)
