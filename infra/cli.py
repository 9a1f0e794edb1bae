"""What every command line shares: one sentence for a user's error, and a clean exit."""

import contextlib
import errno
import sys
from collections.abc import Callable

from infra.errors import FlashdraftError


def main(run: Callable[[], int | None]) -> None:
    """Call `run` and exit with its code; errors that the user can act on become one sentence and exit code 2."""
    try:
        code = run() or 0
    except FlashdraftError as e:
        _say(str(e))
        code = e.exit_code
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = e.filename or "while writing"
        _say(f"the disk is full ({where}); free space and run the same command again: finished work is kept")
        code = 2
    except KeyboardInterrupt:
        _say("interrupted; run the same command again to go on: finished work is kept")
        code = 130
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code)


def _say(sentence: str) -> None:
    print(f"flashdraft: {sentence}", file=sys.stderr)
