"""Hosts on one machine: each with a network, a host name, processes, /tmp/ray and /dev/shm of its own, on one switch.

    with Hosts(folder, ["head", "a", "b"]) as hosts:
        hosts.start("a", ["python", "-m", "http.server", "--bind", hosts.address("a")], log="web")
        hosts.cut("a"); hosts.mend("a")          # the cable
        hosts.kill("a"); hosts.boot("a")         # the power

A host is a set of Linux namespaces whose process 1 is a shell; with it the kernel ends all its processes. Files are
shared, as on a cluster with NFS. Needs root, iproute2 and util-linux; nothing leaves the namespaces.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
# on a machine that is busy with other work: FLASHDRAFT_PATIENCE=3 waits three times as long before it gives up
PATIENCE = float(os.environ.get("FLASHDRAFT_PATIENCE", "1"))
# process 1 adopts and reaps what its children leave behind
INIT = """
hostname "$1"
mount --bind "$2" /etc/hosts
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo up > "$3"
while :; do sleep 3600 & wait $!; done
"""


def missing() -> str:
    """Why this machine cannot run hosts; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    lacking = [p for p in ("ip", "unshare", "nsenter", "hostname", "mount") if not shutil.which(p)]
    if lacking:
        return f"these programs are not installed: {', '.join(lacking)} (packages iproute2, util-linux, hostname)"
    probe = subprocess.run(["ip", "netns", "add", f"fdprobe{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"the kernel gives no network namespaces ({probe.stderr.strip()})"
    _ip("netns", "del", f"fdprobe{os.getpid()}")
    return ""


def say(text: str) -> None:
    """A line of the report that `make cluster-test` prints."""
    print(f"    {time.strftime('%H:%M:%S')}  {text}", flush=True)


class Hosts:
    def __init__(self, folder: Path, names: list[str]):
        self.folder, self.names = folder, names
        self.prefix = f"fd{os.getpid() % 100000}"
        self.switch = f"{self.prefix}-sw"
        self.inits: dict[str, subprocess.Popen] = {}
        self.started: list[subprocess.Popen] = []
        self.env: dict[str, str] = {}

    def __enter__(self) -> "Hosts":
        lines = ["127.0.0.1 localhost", *(f"{self.address(n)} {n}" for n in self.names)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        try:
            _ip("netns", "add", self.switch)
            self._in_switch("link", "add", "br0", "type", "bridge")
            self._in_switch("link", "set", "br0", "up")
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.inits):
            self.kill(name)
        for process in self.started:
            process.kill()
            process.wait()
        for name in [*(self._net(n) for n in self.names), self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def boot(self, name: str) -> None:
        """Power on: a new host with the old name, address and files, and no process."""
        net, inner = self._net(name), f"{self.prefix}{name}"[:15]
        _ip("netns", "add", net)
        _ip("link", "add", inner, "netns", net, "type", "veth", "peer", "name", self._port(name), "netns", self.switch)
        _ip("-n", net, "link", "set", inner, "name", "eth0")
        _ip("-n", net, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", net, "link", "set", "eth0", "up")
        self._in_switch("link", "set", self._port(name), "master", "br0", "up")
        up = self.folder / f"{name}.up"
        up.unlink(missing_ok=True)
        command = ["ip", "netns", "exec", net, "unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command += ["bash", "-c", INIT, "init", name, str(self.folder / "hosts"), str(up)]
        self.inits[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        wait_for(up.is_file, 20, f"host {name}")

    def kill(self, name: str) -> None:
        """A crash: every process of the host ends at once, the kernel closes their connections, the network goes.

        Peers see connections that end. (Without power nothing is closed: `cut` before `kill`.)
        """
        init = self.inits.pop(name)
        os.killpg(init.pid, signal.SIGKILL)
        init.wait()
        pids = ["ip", "netns", "pids", self._net(name)]
        end = time.monotonic() + 10
        while subprocess.run(pids, capture_output=True).stdout.strip() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.3)  # the last packets leave
        subprocess.run(["ip", "netns", "del", self._net(name)], capture_output=True)
        subprocess.run(["ip", "-n", self.switch, "link", "del", self._port(name)], capture_output=True)

    def cut(self, name: str) -> None:
        self._in_switch("link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        self._in_switch("link", "set", self._port(name), "up")

    def start(self, name: str, command: list[str], log: str, **env: str) -> subprocess.Popen:
        """A process on the host; its output goes to `<folder>/<log>.log`."""
        with open(self.folder / f"{log}.log", "ab") as out:
            process = subprocess.Popen(
                self._enter(name, command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=self._env(env), cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, name: str, command: list[str], timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self._enter(name, command), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout * PATIENCE,
            env=self._env(env), cwd=self.folder,
        )  # fmt: skip

    def python(self, name: str, code: str, *arguments: str, timeout: float = 300, **env: str) -> str:
        """What a small program on the host prints."""
        done = self.run(name, [sys.executable, "-c", code, *arguments], timeout, **env)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def end(self, name: str, pattern: str) -> int:
        """SIGKILL to the host's processes whose command line contains `pattern`; how many there were."""
        code = (
            "import os, sys, psutil\n"
            "mine = [p for p in psutil.process_iter(['pid', 'cmdline']) if p.pid not in (1, os.getpid())]\n"
            "found = [p for p in mine if sys.argv[1] in ' '.join(p.info['cmdline'] or [])]\n"
            "[p.kill() for p in found]\nprint(len(found))"
        )
        return int(self.python(name, code, pattern))

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def _enter(self, name: str, command: list[str]) -> list[str]:
        # the shell is a child of `unshare`, which is what `ip netns exec` has become
        shell = Path(f"/proc/{self.inits[name].pid}/task/{self.inits[name].pid}/children").read_text().split()[0]
        enter = ["nsenter", "--target", shell, "--net", "--uts", "--pid", "--mount", "--wd=/", "--"]
        # from inside: a folder opened outside belongs to another mount, and no file could be renamed across
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *command]

    def _env(self, more: dict[str, str]) -> dict[str, str]:
        base = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        return base | self.env | more

    def _net(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _port(self, name: str) -> str:
        return f"p{self.names.index(name)}"

    def _in_switch(self, *arguments: str) -> None:
        _ip("-n", self.switch, *arguments)


def wait_for(condition, seconds: float, what: str, every: float = 0.2, report=str):
    """The first true value of `condition()`; fails the test after `seconds` with `report()`."""
    end = time.monotonic() + seconds * PATIENCE
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds:.0f} s for {what}\n{report()}")
        time.sleep(every)
    return value


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
