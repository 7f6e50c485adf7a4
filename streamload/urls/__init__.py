"""URLs of shards: lists of them from one pattern, their identity, and what of them may be shown.

Step A of the journey. Everything here is a function of its arguments and of the environment variables that it
names (of curl and aws commands also of whether they are configured by a file; of local folders and globs also
of the files that are there); no shard is opened and no file system is imported.
"""

from streamload.urls.commands import Opaque, Request, understand
from streamload.urls.identity import (
    basename,
    digest,
    endpoint,
    former_digest,
    identity,
    is_local,
    local_path,
    origin_of,
    scheme,
)
from streamload.urls.listing import UrlList
from streamload.urls.patterns import Urls, expand_urls, split_sources
from streamload.urls.redaction import redact, redact_text, scrub, scrubbed_errors, secrets_of

__all__ = [
    "Opaque",
    "Request",
    "UrlList",
    "Urls",
    "basename",
    "digest",
    "endpoint",
    "expand_urls",
    "former_digest",
    "identity",
    "is_local",
    "local_path",
    "origin_of",
    "redact",
    "redact_text",
    "scheme",
    "scrub",
    "scrubbed_errors",
    "secrets_of",
    "split_sources",
    "understand",
]
