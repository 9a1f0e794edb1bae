"""Progress of long work: a bar on a terminal, one line per interval in a log, both with an ETA."""

import sys
import time
from typing import Any, TextIO


class Progress:
    """Counts towards `total` and says so.

        with Progress(total=1200, what="prefill", unit="tokens") as p:
            p.update(512, rejects=0)

    Args:
        total: the count at which the work is done, in `unit`s.
        interval_s: seconds between two lines where the output is no terminal.
        start: what an earlier run had already done; it does not count for the rate.
        enabled: False on ranks other than 0.
    """

    def __init__(
        self,
        total: float,
        what: str,
        unit: str = "it",
        *,
        interval_s: float = 10.0,
        start: float = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
    ):
        self.total, self.what, self.unit, self.interval_s = total, what, unit, interval_s
        self.done, self.start, self.enabled = start, start, enabled
        self.stream = stream if stream is not None else sys.stderr
        self.tty = self.stream.isatty()
        self.began = self.shown = time.monotonic()
        self.fields: dict[str, Any] = {}

    @property
    def rate(self) -> float:
        """Units per second since the beginning."""
        return (self.done - self.start) / max(time.monotonic() - self.began, 1e-9)

    def update(self, n: float = 1, **fields: Any) -> None:
        self.done += n
        self.fields.update(fields)
        now = time.monotonic()
        if self.enabled and now - self.shown >= (0.1 if self.tty else self.interval_s):
            self.shown = now
            self._print(end="" if self.tty else "\n")

    def line(self) -> str:
        share = self.done / self.total if self.total else 1.0
        eta = (self.total - self.done) / self.rate if self.done > self.start else float("nan")
        fields = "".join(f" · {k} {_short(v)}" for k, v in self.fields.items())
        return (
            f"{self.what} {share:4.0%} {_short(self.done)}/{_short(self.total)} {self.unit}"
            f" · {_short(self.rate)} {self.unit}/s · ETA {duration(eta)}{fields}"
        )

    def _print(self, end: str) -> None:
        print(("\r\033[K" if self.tty else "") + self.line(), end=end, file=self.stream, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.enabled:
            self._print(end="\n")


def duration(seconds: float) -> str:
    """`75` -> `'1m15s'`, `7322` -> `'2h02m'`; NaN -> `'?'`."""
    if seconds != seconds:
        return "?"
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m"


def _short(v: Any) -> str:
    if isinstance(v, float) and not v.is_integer():
        return f"{v:.4g}"
    if isinstance(v, int | float):
        return f"{v / 1e6:.4g}M" if abs(v) >= 1e7 else str(int(v))
    return str(v)
