"""The errors that streamload raises; all rooms stand on this one.

Every class is also the builtin that callers would catch, and can be made from one string: an error that
crosses from a DataLoader worker is rebuilt as ``type(message)``.

    StreamloadError
    ├── OptionError (ValueError)            an argument or variable that can't be used
    │   ├── UrlError                        a URL, brace pattern or scheme that can't be read
    │   └── StateMismatch                   a saved state that isn't of this loader's run
    ├── OriginError (OSError)               far away: could not be read, after retries
    │   ├── OriginNotFound (FileNotFoundError)
    │   ├── OriginDenied (PermissionError)
    │   ├── OriginTimeout (TimeoutError)    stalled, or did not answer within its deadline
    │   ├── OriginUnavailable (ConnectionError)  can't be reached, or asks to come back later
    │   ├── OriginOutage (ConnectionError)  all of a server or bucket stays away; no shard is skipped for it
    │   ├── OriginStopped                   told to stop from this side
    │   └── OriginCut                       ended before its stated length, or its command failed
    ├── ShardError (ValueError)             the bytes arrived, but are not a shard that can be trusted
    │   ├── ShardFormatError                not a tar: a page, a compressed file, garbage
    │   ├── ShardCut                        a tar without its end
    │   └── DatasetChanged                  another version than the one this run began with
    ├── SampleError (ValueError)            one sample that can't be used
    │   ├── DecodeError                     its image
    │   │   └── ImageTooLarge               which would take too much memory or time to decode
    │   ├── CaptionError                    its caption
    │   │   └── BlankCaption                there is nothing in it, where that isn't allowed
    │   └── LabelError                      its label
    ├── CacheError (OSError)                the tier can't be used
    │   ├── CacheFull                       no room, and nothing may be evicted
    │   ├── CacheCorrupt                    bytes that fail their checksum
    │   └── SharedTierError                 the shared one: away, slow, full, or not ours
    │       └── SharedTierDenied (PermissionError)  it may not be read, or not be written
    ├── DataError (ValueError)              the data as a whole
    │   ├── NoValidSamples                  nothing usable among the first shards or samples
    │   ├── TooManyBadSamples               more than the allowed share can't be used
    │   ├── TooManyBadShards                more than the allowed share of the shards was given up
    │   ├── OrderDiverged                   two workers would read the same data in different orders
    │   └── PlanError                       a published plan that can't be followed
    ├── NotSendable (TypeError)             a batch that can't go from its worker to the rank
    ├── ClusterError (RuntimeError)         a cluster can't be reached, or its nodes can't do the work
    ├── LoaderClosed (RuntimeError)         a batch of an epoch in the middle of which the loader was closed
    │                                       or iterated anew
    ├── RankFailed (RuntimeError)           another rank of the run has ended by an error
    └── WorkerDied (RuntimeError)           a worker process ended without a word
"""

import errno
import logging
import re

# C0 and C1, with line ends and ESC; what turns the direction of text; surrogates, which can't be encoded.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FROM_WORKER = re.compile(r"Caught \w+ [^\n]{0,80}\nOriginal Traceback")  # by torch, with a traceback's lines


def printable(text: str) -> str:
    """Return text as a log or terminal may show it, on one line: control characters as ``\\n``, ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _PrintableRecords(logging.Filter):
    """Makes what is logged printable: names, keys and what servers say come from anywhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if _CONTROL.search(message):
            record.msg, record.args = printable(message), None
        return True


logging.getLogger("streamload").addFilter(_PrintableRecords())


class StreamloadError(Exception):
    """Root of everything that streamload raises on purpose; its message is printable."""

    def __str__(self) -> str:
        text = super().__str__()
        if _FROM_WORKER.match(text):
            return "\n".join(map(printable, text.split("\n")))
        return printable(text)


class OptionError(StreamloadError, ValueError):
    """An argument or variable that can't be used; says the value and what is allowed."""


class UrlError(OptionError):
    """A URL, brace pattern or scheme that can't be read."""


class StateMismatch(OptionError):
    """A saved state that this loader can't go on from: of other data, incomplete, or no state at all."""


class OriginError(StreamloadError, OSError):
    """A shard could not be read from where it lives, after all retries."""


class OriginNotFound(OriginError, FileNotFoundError):
    """The origin says that there is no such shard."""


class OriginDenied(OriginError, PermissionError):
    """The origin refuses to give the shard: credentials are missing, wrong or expired."""


class OriginTimeout(OriginError, TimeoutError):
    """The origin did not answer, or stopped sending, within the deadline."""


class OriginUnavailable(OriginError, ConnectionError):
    """The origin can't be reached, or asks to come back later (429, 5xx); worth another attempt."""

    retry_after_seconds: float | None = None
    """How long the origin asks to be left alone."""

    is_unreachable: bool | None = None
    """True: no host has its name, or nothing listens at its port. False: no connection, which may pass."""


class OriginOutage(OriginError, ConnectionError):
    """All of the server or bucket has been away for as long as it is waited for; it ends the run."""


class OriginStopped(OriginError):
    """The transfer was told to stop from this side; nothing is wrong with the origin."""


class OriginCut(OriginError):
    """The origin ended before its stated length, or its command failed on the way."""


class ShardError(StreamloadError, ValueError):
    """The bytes of a shard arrived, but can't be trusted."""


class ShardFormatError(ShardError):
    """The bytes are not a tar."""


class ShardCut(ShardError):
    """The tar has no end: it was cut before its end marker."""


class DatasetChanged(ShardError):
    """A shard is another version than the one which this run has begun to read."""


class SampleError(StreamloadError, ValueError):
    """One sample can't be used."""


class DecodeError(SampleError):
    """A member of a sample can't be decoded."""


class ImageTooLarge(DecodeError):
    """Decoding an image would take more memory or time than is allowed."""


class CaptionError(SampleError):
    """The caption of a sample can't be read."""


class BlankCaption(CaptionError):
    """The caption of a sample is empty or only white space; the sample counts as one without a caption."""


class LabelError(SampleError):
    """The label of a sample can't be read."""


class CacheError(StreamloadError, OSError):
    """The cache directory can't be used."""


class CacheFull(CacheError):
    """There is no room in the tier and nothing that may be evicted."""


class CacheCorrupt(CacheError):
    """Bytes in the tier fail their checksum."""


class SharedTierError(CacheError):
    """The shared cache can't be used for what was asked of it; trainings go on without it."""


class SharedTierDenied(SharedTierError, PermissionError):
    """The shared cache may not be used for what was asked of it: no permission, or read-only."""


class DataError(StreamloadError, ValueError):
    """The data set as a whole can't be trained on."""


class NoValidSamples(DataError):
    """Nothing usable among the first shards or samples."""


class TooManyBadSamples(DataError):
    """More samples than the allowed share could not be used."""


class TooManyBadShards(DataError):
    """More shards than the allowed share were given up: what is left isn't the data set any more."""


class OrderDiverged(DataError):
    """Two workers computed different orders: they don't see the same samples as usable."""


class PlanError(DataError):
    """What was published of a run can't be followed: forged, cut, of another version, or of other shards."""


class NotSendable(StreamloadError, TypeError):
    """A batch can't be sent from its worker to the rank: something that is in it can't be pickled."""


class ClusterError(StreamloadError, RuntimeError):
    """A cluster can't be reached, or its nodes can't do the work that is asked of them."""


class LoaderClosed(StreamloadError, RuntimeError):
    """A batch was asked of an epoch in the middle of which its loader was closed or iterated anew."""


class RankFailed(StreamloadError, RuntimeError):
    """Another rank of the run has ended by an error, which the message tells."""


class WorkerDied(StreamloadError, RuntimeError):
    """A worker process ended without reporting an error."""


def is_shortage(error: OSError) -> bool:
    """Whether too many files are open, or memory is short: that says nothing about the file asked for."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def add_note(error: Exception, note: str) -> None:
    """Say with an error where it happened: shown below it from Python 3.11 on, before that in the log."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        logging.getLogger("streamload").error("%s: %s %s", type(error).__name__, error, note)
