"""The contenders of the suite: what each is called, which adapter runs it where, and what it reads."""

from benchmarks.turns import Contender

_OWN_TRANSFORM = {"preprocess": "default"}

STREAMLOAD = Contender("streamload", "streamload_", _OWN_TRANSFORM)
STREAMLOAD_AS_GIVEN = Contender("streamload, open_clip's preprocess", "streamload_")
STREAMLOAD_KEPT = Contender("streamload, last 10 batches kept", "streamload_", {**_OWN_TRANSFORM, "keep": 10})

OPEN_CLIP = Contender("open_clip", "openclip", environment="open_clip", reads="path")
WEBDATASET = Contender("webdataset, cache_dir", "webdataset_")
SPDL = Contender("SPDL", "spdl_", _OWN_TRANSFORM, environment="spdl", reads="path")
HUGGINGFACE = Contender("Hugging Face datasets", "huggingface_", environment="huggingface", reads="path")
LITDATA = Contender("LitData", "litdata_", environment="litdata", reads="converted")
MOSAIC = Contender("MosaicML Streaming", "mosaic_", environment="mosaic", reads="converted")
DALI = Contender("DALI on the CPU", "dali_", _OWN_TRANSFORM, environment="dali", reads="converted")
ENERGON = Contender("Megatron-Energon", "energon_", environment="energon", reads="converted")

PEERS = (OPEN_CLIP, WEBDATASET, SPDL, HUGGINGFACE, LITDATA, MOSAIC, DALI, ENERGON)
