"""A Ray cluster of hosts: a head without CPUs, workers that are started again when they end, an S3 server, a laptop."""

import contextlib
import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from hosts import Hosts, wait_for

WORKERS = {"a": 1, "b": 1}  # name -> CPUs
AGAIN = 'while :; do "$@"; sleep 1; done'  # what systemd or Kubernetes does with a node's process
LIST = """
import sys, urllib.request, xml.etree.ElementTree as tree
keys, token = [], ""
while True:
    url = f"http://store:9000/bucket?list-type=2&prefix={sys.argv[1]}{token}"
    page = tree.fromstring(urllib.request.urlopen(url, timeout=20).read())
    keys += [e.text for e in page.iter() if e.tag.endswith("}Key")]
    more = [e.text for e in page.iter() if e.tag.endswith("}NextContinuationToken")]
    if not more: break
    token = "&continuation-token=" + more[0]
print(sum("/commits/" in k and k.endswith(".json") for k in keys))
"""
# takes all CPUs of the named hosts while it runs: what is submitted then runs on the others
HOLD = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init("auto", log_to_driver=False)
class Holder:
    def ready(self): pass
held = []
for node in ray.nodes():
    if node["Alive"] and node["NodeManagerHostname"] in sys.argv[2:]:
        options = {"num_cpus": node["Resources"]["CPU"], "scheduling_strategy": On(node["NodeID"], soft=False)}
        held.append(ray.remote(Holder).options(**options).remote())
ray.get([h.ready.remote() for h in held])
print(sys.argv[1], len(held), flush=True)
time.sleep(3600)
"""
PUT = """
import sys, urllib.request
data = open(sys.argv[2], "rb").read() if len(sys.argv) > 2 else b""
headers = {"Content-Type": "application/octet-stream"}
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT", data=data, headers=headers), timeout=20)
"""


class RayHosts:
    """Started in order: S3, head, workers. Everything but the laptop has the secrets in its environment."""

    def __init__(self, hosts: Hosts, folder: Path, workers: dict[str, int]):
        self.hosts, self.folder, self.workers = hosts, folder, workers
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.cluster = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-the-store",
            "AWS_ENDPOINT_URL": "http://store:9000",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        self.laptop = {"RAY_AUTH_TOKEN_PATH": str(token)}
        (folder / "ray.toml").write_text(
            'platform = "ray"\naddress = "http://head:8265"\nprivate_network = true\n'
            f'workdir = "{folder}"\nstore = "s3://bucket/store"\nnodes = 2\ngpus_per_node = 0\ncpus_per_node = 1\n'
            'retries = 0\nsecrets = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]\n'
        )

    def start(self) -> None:
        self.hosts.start("store", ["moto_server", "-H", "0.0.0.0", "-p", "9000"], "store")
        bucket = [sys.executable, "-c", PUT, "http://store:9000/bucket"]
        wait_for(lambda: self.hosts.run("store", bucket).returncode == 0, 60, "S3")
        ip = self.hosts.address("head")
        head = ["ray", "start", "--head", "--block", f"--node-ip-address={ip}", "--port=6379", "--num-cpus=0"]
        head += [f"--dashboard-host={ip}", "--object-store-memory=100000000", "--disable-usage-stats"]
        self.hosts.start("head", head, "head", **self.cluster)
        for name in self.workers:
            self.start_worker(name)
        logs = lambda: "\n".join(self.hosts.log(n)[-600:] for n in ("head", *self.workers))  # noqa: E731
        wait_for(lambda: self.alive() == 1 + len(self.workers), 150, "the head and the workers", 1, report=logs)

    def start_worker(self, name: str) -> None:
        worker = ["ray", "start", "--block", "--address=head:6379", f"--node-ip-address={self.hosts.address(name)}"]
        worker += [f"--num-cpus={self.workers[name]}", "--object-store-memory=100000000", "--disable-usage-stats"]
        self.hosts.start(name, ["bash", "-c", AGAIN, "node", *worker], name, **self.cluster)

    @contextlib.contextmanager
    def held(self, *names: str) -> Iterator[None]:
        """Meanwhile the CPUs of these hosts are taken, by nothing that works."""
        mark = f"held-{'-'.join(names)}-{secrets.token_hex(4)}"
        self.hosts.start("head", [sys.executable, "-c", HOLD, mark, *names], mark, **self.cluster)
        said = lambda: f"{mark} {len(names)}" in self.hosts.log(mark)  # noqa: E731
        wait_for(said, 120, f"holding {names}", report=lambda: self.hosts.log(mark)[-1500:])
        try:
            yield
        finally:
            self.hosts.end("head", mark)

    def alive(self) -> int:
        """Nodes that the head counts as alive."""
        code = (
            "import json, os, sys, urllib.request\n"
            "token = open(os.environ['RAY_AUTH_TOKEN_PATH']).read()\n"
            "request = urllib.request.Request('http://head:8265/api/v0/nodes', "
            "headers={'Authorization': 'Bearer ' + token})\n"
            "rows = json.load(urllib.request.urlopen(request, timeout=10))['data']['result']['result']\n"
            "print(sum(r['state'] == 'ALIVE' for r in rows))"
        )
        done = self.hosts.run("laptop", [sys.executable, "-c", code], **self.laptop)
        return int(done.stdout) if done.returncode == 0 else 0

    def put(self, key: str, path: Path) -> None:
        self.hosts.python("store", PUT, f"http://store:9000/bucket/{key}", str(path))

    def commits(self, prefix: str) -> int:
        """Shards committed below a prefix of the bucket."""
        return int(self.hosts.python("store", LIST, prefix))

    def submit(self, what: str, job: str, *words: str):
        """`python -m infra submit` on the laptop, which follows the job's log (`<job>.log`) and ends with it."""
        command = [sys.executable, "-m", "infra", "submit", what, "--on", "ray", "--profile", "ray.toml"]
        return self.hosts.start("laptop", [*command, "--submission-id", job, "MODEL=tiny", *words], job, **self.laptop)

    def control(self, verb: str, job: str) -> str:
        """What `infra submit status|logs|stop` prints on the laptop; `logs` returns when the job has ended."""
        command = [sys.executable, "-m", "infra", "submit", verb, "--on", "ray", "--profile", "ray.toml", job]
        done = self.hosts.run("laptop", command, timeout=400, **self.laptop)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    def features(self, job: str, *words: str):
        return self.submit(
            "features", job, f"CORPUS={self.folder}/kept.toml", "ray.actors=2", "ray.cpus_per_actor=1", *words
        )

    def result(self, data_root: str) -> dict:
        """`features.json` of a finished run."""
        found = list((self.folder / data_root).glob("tiny/*/features.json"))
        assert len(found) == 1, f"no finished run below {data_root}"
        return json.loads(found[0].read_text())
