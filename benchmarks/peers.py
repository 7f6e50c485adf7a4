"""The contenders of the suite: what each is called, which adapter runs it where, and what it reads."""

from benchmarks.contenders.job import JITTERED
from benchmarks.turns import Contender

_OWN_TRANSFORM = {"preprocess": "default"}
_JITTERED = {"preprocess": JITTERED}

STREAMLOAD = Contender("streamload", "streamload_", _OWN_TRANSFORM)
STREAMLOAD_UINT8 = Contender("streamload, uint8", "streamload_", {**_OWN_TRANSFORM, "images": "uint8"})
STREAMLOAD_COMPILED = Contender("streamload, open_clip's preprocess", "streamload_")
STREAMLOAD_AS_GIVEN = Contender("streamload, preprocess as given", "streamload_", {"compile": False})
STREAMLOAD_JITTERED = Contender("streamload, with colour jitter", "streamload_", _JITTERED)
STREAMLOAD_KEPT = Contender("streamload, last 10 batches kept", "streamload_", {**_OWN_TRANSFORM, "keep": 10})

FLOOR = Contender("floor", "floor", _OWN_TRANSFORM, reads="path")
FLOOR_UINT8 = Contender("floor, uint8", "floor", {**_OWN_TRANSFORM, "images": "uint8"}, reads="path")
FLOOR_OF_LIBRARIES = Contender(
    "floor by the libraries", "floor", {**_OWN_TRANSFORM, "by_libraries": True}, reads="path"
)
FLOOR_OF_LIBRARIES_UINT8 = Contender(
    "floor by the libraries, uint8",
    "floor",
    {**_OWN_TRANSFORM, "by_libraries": True, "images": "uint8"},
    reads="path",
)

OPEN_CLIP = Contender("open_clip", "openclip", environment="open_clip", reads="path")
OPEN_CLIP_JITTERED = Contender(
    "open_clip, with colour jitter", "openclip", _JITTERED, environment="open_clip", reads="path"
)
WEBDATASET = Contender("webdataset, cache_dir", "webdataset_")
SPDL = Contender("SPDL", "spdl_", _OWN_TRANSFORM, environment="spdl", reads="path")
SPDL_4_THREADS = Contender(
    "SPDL, 4 threads", "spdl_", {**_OWN_TRANSFORM, "workers": 4}, environment="spdl", reads="path"
)
HUGGINGFACE = Contender("Hugging Face datasets", "huggingface_", environment="huggingface", reads="path")
LITDATA = Contender("LitData", "litdata_", environment="litdata", reads="converted")
MOSAIC = Contender("MosaicML Streaming", "mosaic_", environment="mosaic", reads="converted")
DALI = Contender("DALI on the CPU", "dali_", _OWN_TRANSFORM, environment="dali", reads="converted")
ENERGON = Contender("Megatron-Energon", "energon_", environment="energon", reads="converted")

PEERS = (OPEN_CLIP, WEBDATASET, SPDL, HUGGINGFACE, LITDATA, MOSAIC, DALI, ENERGON)
