"""The commands ``koffline`` and ``python -m koffline``; Ctrl-C is quiet also while modules are imported."""

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``koffline`` command."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-: the next file opened would take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+", encoding="utf-8"))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    heard = signal.getsignal(signal.SIGINT)
    try:
        if callable(heard):  # background commands of a shell ignore Ctrl-C
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        from koffline.cli import main as run

        signal.signal(signal.SIGINT, heard)
        run()
    except KeyboardInterrupt:  # the command itself says more
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
