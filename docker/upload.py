"""Make shards of real photographs and put them into a bucket: the one-off before the trainer of compose.yaml.

The store and its keys come from the AWS_* variables.
"""

import argparse
import tempfile

import s3fs
from photograph_shards import write_photograph_shards


def upload(target: str, samples: int, samples_per_shard: int) -> None:
    """Write shards and sizes.json to `target` (s3://bucket), which is made if it is missing."""
    store = s3fs.S3FileSystem()
    store.makedirs(target, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_photograph_shards(folder, samples, samples_per_shard)
        for path in (*map(str, shards), f"{folder}/sizes.json"):
            store.put_file(path, f"{target}/{path.rpartition('/')[2]}")
    print(f"{samples} samples in {len(shards)} shards at {target}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--samples-per-shard", type=int, default=256)
    upload(**vars(parser.parse_args()))
