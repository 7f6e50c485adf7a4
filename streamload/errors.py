"""The errors that streamload raises. The bottom layer: every room may import it.

Every class is also the builtin that callers would catch, and can be created from one string: torch rebuilds
an error from a DataLoader worker as ``type(message)``. The reference page of errors is generated from here.
"""

import errno
import logging
import re
import traceback

# C0 and C1 (line ends, ESC), bidirectional controls, and surrogates, which can't be encoded.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FROM_WORKER = re.compile(r"Caught \w+ [^\n]{0,80}\nOriginal Traceback")  # added by torch, with a traceback


def printable(text: str) -> str:
    """Return text for a log or terminal, on one line: control characters as ``\\n``, ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _PrintableRecords(logging.Filter):
    """Makes log records printable: names, keys and messages of servers are untrusted."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if _CONTROL.search(message):
            record.msg, record.args = printable(message), None
        return True


logging.getLogger("streamload").addFilter(_PrintableRecords())


class StreamloadError(Exception):
    """Root of all errors that streamload raises on purpose. Its message is printable."""

    def __str__(self) -> str:
        text = super().__str__()
        if _FROM_WORKER.match(text):
            return "\n".join(map(printable, text.split("\n")))
        return printable(text)


class OptionError(StreamloadError, ValueError):
    """An argument or variable has an invalid value; the message says what is allowed."""


class UrlError(OptionError):
    """A URL, brace pattern or scheme is invalid."""


class StateMismatch(OptionError):
    """This loader can't resume from a state: it is of other data, incomplete, or not a state."""


class OriginError(StreamloadError, OSError):
    """A shard could not be read from its origin, after all retries."""

    may_pass: bool = False
    """A refusal that a server may take back at once: 403 or 404 from one of several backends."""
    may_be_renewed: bool = False
    """The credentials have ended or couldn't be read: others may come, and it says nothing of its shard."""
    have_ended: bool = False
    """A store says that the credentials aren't valid any more: that is true of all of its shards."""
    retry_after_seconds: float | None = None
    """The delay that the origin asks for."""
    is_unreachable: bool | None = None
    """True: no host has its name, or nothing listens at its port. False: a temporary failure."""


class OriginNotFound(OriginError, FileNotFoundError):
    """The origin says that there is no such shard."""


class OriginDenied(OriginError, PermissionError):
    """The origin denies access: credentials are missing, wrong or expired."""


class OriginTimeout(OriginError, TimeoutError):
    """The origin did not answer, or stopped sending, within the deadline."""


class OriginUnavailable(OriginError, ConnectionError):
    """The origin can't be reached, or asks to retry later (429, 5xx)."""


class OriginOutage(OriginError, ConnectionError):
    """The whole server or bucket was down for too long. Ends the run, instead of skipping its shards."""


class OriginStopped(OriginError):
    """The transfer was stopped by this process; nothing is wrong with the origin."""


class OriginCut(OriginError):
    """The shard ended before its stated length, or its command failed."""


class ShardError(StreamloadError, ValueError):
    """The bytes of a shard arrived, but are not valid."""


class ShardFormatError(ShardError):
    """The bytes are not a tar: a web page, a compressed file, garbage."""


class ShardCut(ShardError):
    """The tar is cut: it has no end marker."""


class DatasetChanged(ShardError):
    """A shard has another version than at the beginning of this run."""


class SampleError(StreamloadError, ValueError):
    """One sample can't be used."""


class DecodeError(SampleError):
    """The image of a sample can't be decoded."""


class ImageTooLarge(DecodeError):
    """Decoding an image would take more memory or time than allowed."""


class CaptionError(SampleError):
    """The caption of a sample can't be read."""


class BlankCaption(CaptionError):
    """The caption of a sample is empty or only whitespace, with `blank_captions=False`."""


class LabelError(SampleError):
    """The label of a sample can't be read."""


class CacheError(StreamloadError, OSError):
    """The cache directory can't be used."""


class CacheFull(CacheError):
    """The tier is full, and nothing may be evicted."""


class CacheCorrupt(CacheError):
    """Bytes in the tier fail their checksum."""


class SharedTierError(CacheError):
    """The shared cache is down, slow, full, or not ours; trainings go on without it."""


class SharedTierDenied(SharedTierError, PermissionError):
    """The shared cache denies access, or is read-only."""


class DataError(StreamloadError, ValueError):
    """The data set as a whole is unusable."""


class NoValidSamples(DataError):
    """There is no usable sample among the first shards or samples."""


class TooManyBadSamples(DataError):
    """More than the allowed share of the samples is unusable, or all of a pass."""


class TooManyBadShards(DataError):
    """More than the allowed share of the shards was given up."""


class OrderDiverged(DataError):
    """Two workers computed different orders, because they found different samples usable."""


class PassMismatch(DataError):
    """An epoch has ended with another number of samples than was due by the indexes of its shards."""


class PlanError(DataError):
    """A plan file can't be followed: it is forged, cut, of another version, or of other shards."""


class DecisionsError(DataError):
    """A log of decisions can't be followed: it was altered, is cut, or is of another run."""


class JournalError(DataError):
    """A journal can't be read, was altered, or lacks what a question needs; or a step can't be made again."""


class PolicyError(StreamloadError, ValueError):
    """A policy of weights or batch sizes failed, or its answer can't be used. All ranks raise it."""


class FeatureError(StreamloadError, ValueError):
    """A module's result can't be kept in a cache of rows, or a kept row can't be trusted."""


class FeatureNotCacheable(FeatureError):
    """A module's results depend on more than its inputs and what can be seen of it, or can't be stored."""


class FeatureMismatch(FeatureError):
    """A stored row is of another input than the one given with its key, or isn't what is computed now."""


class NotSendable(StreamloadError, TypeError):
    """A batch can't be sent from its worker to the rank, because a value in it can't be pickled."""


class ClusterError(StreamloadError, RuntimeError):
    """A cluster can't be reached, or its nodes can't do the requested work."""


class LoaderClosed(StreamloadError, RuntimeError):
    """A batch was requested from an epoch whose loader was closed or iterated again in the middle."""


class RankFailed(StreamloadError, RuntimeError):
    """Another rank of the run failed; the message has its error."""


class WorkerDied(StreamloadError, RuntimeError):
    """A worker process died without reporting an error."""


class LimitReached(StreamloadError, OSError):
    """A limit of the process or machine refuses open files, processes, threads or memory maps.

    The message names the limit, its value, and what to set.
    """


def is_shortage(error: OSError) -> bool:
    """Return whether a resource of this process is short (open files, memory), so the file may be fine."""
    return isinstance(error, LimitReached) or error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def add_note(error: Exception, note: str) -> None:
    """Add where an error happened: shown below it from Python 3.11 on, logged before that."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        logging.getLogger("streamload").error("%s: %s %s", type(error).__name__, error, note)


def as_failure(error: Exception) -> Exception:
    """Return a RuntimeError in place of a StopIteration, which would be taken for the end of the data.

    It names the function that raised it, and the sample. Where a StopIteration leaves a generator Python has
    made a RuntimeError of it already (PEP 479), which names neither.
    """
    is_stop = isinstance(error, StopIteration)
    stop = error.__cause__ if str(error) == "generator raised StopIteration" else error if is_stop else None
    if not isinstance(stop, StopIteration):
        return error
    name = "a function"
    for frame, _ in traceback.walk_tb(stop.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("streamload."):
            name = "a function"
        elif name == "a function":  # the first one after the last of ours
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    raised = [f"{at.filename}:{at.lineno}, in {at.name}" for at in traceback.extract_tb(stop.__traceback__)]
    notes = dict.fromkeys([*getattr(stop, "__notes__", ()), *getattr(error, "__notes__", ())])
    failure = RuntimeError(
        f"{name} raised {stop!r} ({'; '.join([*raised[-1:], *notes])}), by which all later samples would be "
        f"lost: raise another error, or give next() a default"
    )
    failure.__cause__ = stop
    return failure
