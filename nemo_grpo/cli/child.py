"""``python -m nemo_grpo.cli.child``: the command line, in a process that does not outlive its parent.

The parent holds the other end of the pipe that is this process's standard input. When the parent ends, in any
way, the input ends too. This process then sends itself SIGTERM, so that the run saves a checkpoint and stops.
"""

import os
import signal
import threading

from nemo_grpo.cli import main


def stop_with_parent() -> None:
    """Send this process SIGTERM when its standard input ends."""

    def wait() -> None:
        # os.read instead of sys.stdin: a thread that waits in sys.stdin holds its lock when Python exits.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    stop_with_parent()
    main()
