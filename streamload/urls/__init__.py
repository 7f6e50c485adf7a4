"""URLs of shards: expansion of patterns, identity, and redaction (step A).

Pure functions of their arguments and of the environment variables that they name. Two exceptions: curl and
aws commands are checked for configuration files, and folders and globs are listed, local ones and the Hugging
Face Hub's (by its library, in hub.py). No shard is opened.
"""

from streamload.urls.identity import (
    ZSTD_MODULES,
    Compression,
    basename,
    compression,
    digest,
    endpoint,
    folder_of,
    former_digest,
    identity,
    is_local,
    local_path,
    origin_of,
    request_of,
    scheme,
    zstd_module,
)
from streamload.urls.listing import UrlList
from streamload.urls.patterns import Urls, expand_urls, split_sources
from streamload.urls.redaction import redact, redact_text, scrub, scrubbed_errors, secrets_of

__all__ = [
    "ZSTD_MODULES",
    "Compression",
    "UrlList",
    "Urls",
    "basename",
    "compression",
    "digest",
    "endpoint",
    "expand_urls",
    "folder_of",
    "former_digest",
    "identity",
    "is_local",
    "local_path",
    "origin_of",
    "redact",
    "redact_text",
    "request_of",
    "scheme",
    "scrub",
    "scrubbed_errors",
    "secrets_of",
    "split_sources",
    "zstd_module",
]
