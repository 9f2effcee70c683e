"""Starts a llama-server and ends it when its own parent ends, however that ends. Run as a script, not imported.

The parent holds the other end of this process's standard input, so the pipe closes when the parent is done with the
server and when it dies, by SIGKILL too. On Linux the server also dies with this process. Standard library only: it is
started with ``python -I -S``.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 3.0
"""How long a server may take to end by itself before it is killed."""
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that made it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run `command` to its end; its exit code, or 128 and the signal that ended it, as shells say it."""
    prepare = die_with_parent if sys.platform == "linux" else None  # safe: no thread runs yet
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509

    def stop() -> None:
        while os.read(
            0, 1
        ):  # not sys.stdin, whose lock this thread would hold when the interpreter ends
            pass
        server.terminate()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()

    threading.Thread(target=stop, daemon=True).start()
    code = server.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
