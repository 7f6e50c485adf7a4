"""The manifests of deploy/kubernetes fit each other and the image, and their commands run as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from urllib3.exceptions import HTTPError

from streamload.cache.shard import ShardList
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.tier import SharedTier
from streamload.daemon.plan_file import PlannedSource, PlanProgress, plan_of
from streamload.metrics import Counters
from streamload.options import parse_size
from streamload.order.plan import OrderOptions
from streamload.testing.shards import write_shards
from streamload.urls import expand_urls
from tests.support import promtool
from tests.support.jobs import in_switch
from tests.support.networks import Switch
from tests.support.pages import get
from tests.support.pods import MANIFESTS, command_of, environ_of, manifests, start_pod, why_no_pods
from tests.support.s3 import S3Server

ROOT = Path(__file__).parents[2]
DAEMONS, WARM = manifests("daemons.yaml"), manifests("warm.yaml")
TEMPLATES = [DAEMONS["StatefulSet"]["spec"]["template"], WARM["Job"]["spec"]["template"]]
GROUPS, SHARDS = 5, 20
needs_pods = pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())


def test_each_daemon_has_its_share_and_all_have_all_groups() -> None:
    stateful = DAEMONS["StatefulSet"]["spec"]
    (container,) = stateful["template"]["spec"]["containers"]
    shares = []
    for ordinal in range(stateful["replicas"]):
        environ = environ_of(container, ordinal)
        shares += [word for word in command_of(container, environ) if word.startswith("--group")]
    assert shares == [f"--group={n}/{stateful['replicas']}" for n in range(stateful["replicas"])]


def test_the_objects_find_each_other() -> None:
    stateful, service = DAEMONS["StatefulSet"], DAEMONS["Service"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    (monitored,) = manifests("pod-monitor.yaml").values()
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    for selector in (stateful["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    assert monitored["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = TEMPLATES[0]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--listen=0.0.0.0:{ports['metrics']}" in container["command"]
    named = [each["port"] for each in monitored["spec"]["podMetricsEndpoints"]]
    probed = [container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")]
    assert {*named, *probed, service["spec"]["ports"][0]["targetPort"]} == ports.keys()
    for template in TEMPLATES:
        assert template["spec"]["serviceAccountName"] == DAEMONS["ServiceAccount"]["metadata"]["name"]


@pytest.mark.parametrize("template", TEMPLATES, ids=["daemons", "warm"])
def test_a_pod_fits_the_image_its_volume_and_the_notice_of_its_node(template: dict[str, Any]) -> None:
    pod, (container,) = template["spec"], template["spec"]["containers"]
    user = re.search(r"^USER (\d+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert pod["securityContext"]["runAsUser"] == int(user[1])
    assert pod["terminationGracePeriodSeconds"] == 110
    grace = [float(word[8:]) for word in container["command"] if word.startswith("--grace=")]
    assert all(seconds < 110 for seconds in grace)
    environ = environ_of(container, 0)
    (volume,) = pod["volumes"]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] != "/tmp"]
    assert environ["STREAMLOAD_CACHE_DIR"].startswith(mount["mountPath"] + "/")
    asked, most = (container["resources"][name] for name in ("requests", "limits"))
    sizes = [volume["emptyDir"]["sizeLimit"], asked["ephemeral-storage"], most["ephemeral-storage"]]
    in_bytes = [parse_size(environ["STREAMLOAD_CACHE_SIZE"], "cache_size")]
    in_bytes += [parse_size(f"{size}B", "limit") for size in sizes]
    assert in_bytes == sorted(in_bytes)


def test_the_rule_has_the_alerts_of_the_compose_file(tmp_path: Path) -> None:
    done = subprocess.run([MANIFESTS / "prometheus-rule.sh"], capture_output=True, text=True, check=True)
    rule = yaml.safe_load(done.stdout)
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "docker" / "alerts.yml").read_text())
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]))


@promtool.needs_promtool
def test_promtool_takes_the_rules_body(tmp_path: Path) -> None:
    done = subprocess.run([MANIFESTS / "prometheus-rule.sh"], capture_output=True, text=True, check=True)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(yaml.safe_load(done.stdout)["spec"]))
    checked = promtool.run("check", "rules", tmp_path / "rules.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Cluster:
    """A store with the manifests' buckets, and what the cluster gives its pods: a role by a token (IRSA)."""

    def __init__(self, store: S3Server, place: Path, shards: int):
        self.place = place
        os.environ.update(store.environ)
        self.paths = write_shards(place / "origin", [2] * shards)
        for bucket in ("data", "bucket"):
            store.create_bucket(bucket)
        store.put_files("data", *self.paths)
        token = place / "token"
        token.write_text("eyJhbGciOiJSUzI1NiJ9.e30.c2lnbmVk")
        role = DAEMONS["ServiceAccount"]["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
        self.given = {
            "AWS_ENDPOINT_URL": store.endpoint,
            "AWS_ROLE_ARN": role,
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
            "AWS_STS_REGIONAL_ENDPOINTS": "regional",
        }
        self.urls = expand_urls(f"s3://data/{{00000..{shards - 1:05d}}}.tar")
        (container,) = TEMPLATES[0]["spec"]["containers"]
        self.objects = Objects(environ_of(container, 0)["STREAMLOAD_SHARED_CACHE"])

    def publish_run(self) -> None:
        """As a training of several groups does that has just begun."""
        order = OrderOptions(7, GROUPS, 2, 10)
        made, why = plan_of([PlannedSource(len(self.urls), order)], False, self.urls, None)
        assert not why
        self.objects.write(f"runs/{made.run}/plan.json", made.written())
        for group in range(GROUPS):
            progress = PlanProgress(group, 0, ((0, 0),))
            self.objects.write(f"runs/{made.run}/{progress.name}", progress.written())

    def held(self) -> int:
        """How many shards the shared cache holds as they are at their origin."""
        tier, count = SharedTier(self.objects, Counters()), 0
        for shard, path in zip(ShardList(self.urls, None), self.paths, strict=True):
            held = tier.look(shard)
            count += held is not None and tier.read(shard, held, 0, held.size) == path.read_bytes()
        return count

    @property
    def data_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def scraped(address: str, name: str) -> float:
    """A number of a daemon's page."""
    _, text = get(f"http://{address}:9433/metrics")
    found = re.search(rf"^streamload_daemon_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def answers(address: str, probe: dict[str, Any]) -> bool:
    """As the kubelet asks, at the pod's own address."""
    try:
        return bool(get(f"http://{address}:9433{probe['httpGet']['path']}")[0] == 200)
    except HTTPError:  # it doesn't listen yet
        return False


@needs_pods
def test_the_daemons_bring_all_groups_once_and_end_well(tmp_path: Path) -> None:
    def alone(switch: Switch) -> Any:
        with S3Server(switch.address) as store, ExitStack() as stack:
            cluster = Cluster(store, tmp_path, SHARDS)
            cluster.publish_run()
            pods, addresses = [], []
            for ordinal in range(DAEMONS["StatefulSet"]["spec"]["replicas"]):
                host = 2 + ordinal
                place = tmp_path / f"pod-{ordinal}"
                pod = start_pod(switch, host, TEMPLATES[0], place, ordinal=ordinal, environ=cluster.given)
                pods.append(stack.enter_context(pod))
                addresses.append(f"192.0.2.{host}")
            (container,) = TEMPLATES[0]["spec"]["containers"]
            for address in addresses:
                until(lambda address=address: answers(address, container["livenessProbe"]))
                until(lambda address=address: answers(address, container["readinessProbe"]))
            until(lambda: cluster.held() == SHARDS)
            until(lambda: all(scraped(address, "shards_working") == 0 for address in addresses))
            brought = [scraped(address, "shards_brought_total") for address in addresses]
            arrived = sum(scraped(address, "origin_bytes_total") for address in addresses)
            for pod in pods:
                os.kill(pod.pid, signal.SIGTERM)
            ended = [pod.finish(60.0) for pod in pods]
            return brought, arrived == cluster.data_bytes, ended, cluster.objects.names("leases")

    brought, is_once, ended, leases = in_switch(alone)
    assert sum(brought) == SHARDS
    assert all(brought)
    assert is_once
    assert [code for code, _ in ended] == [0] * len(ended), ended
    assert all("told to end by SIGTERM" in said for _, said in ended)
    assert leases == []


@needs_pods
def test_the_job_fills_the_shared_cache(tmp_path: Path) -> None:
    (container,) = TEMPLATES[1]["spec"]["containers"]
    (pattern,) = [word for word in container["command"] if word.startswith("s3://")]
    shards = len(expand_urls(pattern))

    def alone(switch: Switch) -> Any:
        with S3Server(switch.address) as store:
            cluster = Cluster(store, tmp_path, shards)
            place = tmp_path / "pod"
            with start_pod(switch, 2, TEMPLATES[1], place, environ=cluster.given) as pod:
                return *pod.finish(120.0), cluster.held()

    code, said, held = in_switch(alone)
    assert code == 0, said
    assert held == shards
    assert f"{shards} were stored in the shared cache" in said
