"""SIGTERM and Ctrl-C: finish the step, save, exit 0. A second Ctrl-C ends at once."""

import os
import signal
import threading
import time
from types import FrameType


class StopRequest:
    """`requested` turns True on the first SIGTERM or SIGINT of this process.

    torchrun passes the terminal's Ctrl-C on as another signal: repeats within a second count as the same request.
    """

    def __init__(self) -> None:
        self.requested = False
        self._at = 0.0
        if threading.current_thread() is not threading.main_thread():
            return  # under Ray Train the loop is in a thread, and Ray ends the process
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._at > 1.0 and number == signal.SIGINT:
            os._exit(130)
        if not self.requested:
            self.requested, self._at = True, now
