"""Machines of one training watch one another, because the ranks cannot tell a lost machine from a slow one.

A process that ends closes its connections, and the collectives of the others fail at once. A machine without power or
network closes nothing: the others would wait for the process group's 30 minutes. So each launcher (`python -m trainer
--nodes N`) writes a growing number into the store of torchrun's rendezvous and reads the others'. Where one stands
still for `timeout_s`, all processes here are ended: the same command goes on from the last checkpoint.
"""

import contextlib
import datetime
import os
import sys
import threading
import time

LOST = 75  # exit code: try again (EX_TEMPFAIL of sysexits.h); 2 is for what the user must mend
BEAT_S = 2.0
JOIN_S = 600.0  # the first machine may come up last
ENDED = "ended"


class PeerWatch:
    """Two threads: one talks to the store, which may block for ever; the other only looks at the clock.

    Args:
        rendezvous: HOST:PORT of torchrun's store, which one of the machines opens.
        run: name of the training; machines with the same name are peers.
        timeout_s: silence after which a machine counts as lost.
        name: of this machine among them.
    """

    def __init__(self, rendezvous: str, run: str, timeout_s: float, name: str):
        host, _, port = rendezvous.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self.run, self.timeout_s, self.name = run, timeout_s, name
        self._leaving, self._finished = threading.Event(), False
        self._store_at: float | None = None  # when the store last answered; None: not yet
        self._heard: dict[str, tuple[str, float]] = {}  # machine -> its last word, and when that was new
        self._beating = threading.Thread(target=self._beat, daemon=True)
        threading.Thread(target=self._judge, daemon=True).start()
        self._beating.start()

    def leave(self, *, finished: bool) -> None:
        """Stop. One that finished tells the others, who then expect nothing from it; one that failed stays silent, and
        they end too, if their collectives have not failed before."""
        self._finished = finished
        self._leaving.set()
        self._beating.join(timeout=2 * BEAT_S)

    def lost(self, now: float) -> str:
        """Which machine has been silent for too long; empty if none."""
        if self._store_at is None:
            return ""
        if now - self._store_at > self.timeout_s:
            return f"{self.host} (the rendezvous)"
        silent = [n for n, (word, at) in self._heard.items() if word != ENDED and now - at > self.timeout_s]
        return ", ".join(sorted(silent))

    def _beat(self) -> None:
        from torch.distributed import PrefixStore, TCPStore

        wait = datetime.timedelta(seconds=JOIN_S)
        with contextlib.suppress(RuntimeError):  # no store any more: silence, which the other thread judges
            server = TCPStore(self.host, self.port, is_master=False, timeout=wait, wait_for_workers=False)
            store = PrefixStore(f"flashdraft/{self.run}", server)
            count = 0
            store.set(self.name, "0")
            store.append("machines", f"{self.name}\n")
            while not self._leaving.wait(BEAT_S):
                count += 1
                store.set(self.name, str(count))
                names = sorted({*store.get("machines").decode().split("\n")} - {"", self.name})
                words = [w.decode() for w in store.multi_get(names)] if names else []
                self._store_at = time.monotonic()
                for other, word in zip(names, words, strict=True):
                    if other not in self._heard or self._heard[other][0] != word:
                        self._heard[other] = (word, self._store_at)
            if self._finished:
                store.set(self.name, ENDED)

    def _judge(self) -> None:
        while not self._leaving.wait(BEAT_S / 2):
            if lost := self.lost(time.monotonic()):
                print(
                    f"flashdraft: no sign of life from {lost} for {self.timeout_s:.0f} s; the training here is ended: "
                    "give the same command again on the machines that are left, it goes on from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                _end()


def _end() -> None:
    """SIGKILL to the ranks and all that they started, then this process: they hang in collectives and handle SIGTERM
    by finishing a step."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(LOST)
