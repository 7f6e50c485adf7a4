"""OpenStack Swift with its S3 front, all of its servers in one process; runs in the environment of stores.

Usage: python swift_server.py DIRECTORY PORT ACCOUNT:USER SECRET

One device, one replica: proxy (on PORT), account, container and object server on loopback.
"""

import eventlet

eventlet.monkey_patch()

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from eventlet import wsgi  # noqa: E402
from swift.common import utils  # noqa: E402
from swift.common.http_protocol import SwiftHttpProtocol  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402
from swift.common.utils import NullLogger  # noqa: E402
from swift.common.wsgi import loadapp  # noqa: E402

COMMON = """
[swift-hash]
swift_hash_path_suffix = of-this-run
[storage-policy:0]
name = one
default = yes
"""
PROXY = """
[DEFAULT]
swift_dir = {root}
[pipeline:main]
pipeline = catch_errors s3api tempauth copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
allow_account_management = true
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:s3api]
use = egg:swift#s3api
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{user} = {secret} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""
BACK_END = """
[DEFAULT]
swift_dir = {root}
devices = {root}/devices
mount_check = false
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""


def main() -> None:
    root, port = Path(sys.argv[1]), int(sys.argv[2])
    account, _, user = sys.argv[3].partition(":")
    (root / "devices" / "disk").mkdir(parents=True)
    (root / "swift.conf").write_text(COMMON)
    utils.set_swift_dir(str(root))
    for kind in ("account", "container", "object"):
        listening = eventlet.listen(("127.0.0.1", 0))
        _write_ring(root / f"{kind}.ring.gz", listening.getsockname()[1])
        (root / f"{kind}.conf").write_text(BACK_END.format(root=root, kind=kind))
        eventlet.spawn(_serve, root, kind, listening)
    proxy = PROXY.format(root=root, account=account, user=user, secret=sys.argv[4])
    (root / "proxy.conf").write_text(proxy)
    _serve(root, "proxy", eventlet.listen(("127.0.0.1", port)))


def _write_ring(path: Path, port: int) -> None:
    where = {"ip": "127.0.0.1", "port": port, "replication_ip": "127.0.0.1", "replication_port": port}
    ring = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
    ring.add_dev({"region": 1, "zone": 1, "device": "disk", "weight": 1, "meta": "", **where})
    ring.rebalance()
    ring.get_ring().save(str(path))


def _serve(root: Path, kind: str, listening: object) -> None:
    """As Swift's own run_server, which takes a process for itself."""
    app = loadapp(str(root / f"{kind}.conf"), global_conf={"log_name": kind})
    wsgi.server(listening, app, NullLogger(), protocol=SwiftHttpProtocol, capitalize_response_headers=False)


if __name__ == "__main__":
    main()
