"""``python -m nemo_grpo.cli.child``: the command line, in a process that does not outlive its parent.

The parent holds the other end of this process's standard input. The input ends with the parent, however that
ends; the run is then asked once to stop: it saves a checkpoint and ends.
"""

import os
import signal
import threading

from nemo_grpo.cli import main


def stop_with_parent() -> None:
    """Send this process SIGTERM when its standard input ends."""

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock a waiting thread would hold at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    stop_with_parent()
    main()
