"""The command ``koffline``, and ``python -m koffline``: Ctrl-C is quiet while modules are imported, too."""

import os
import signal


def main() -> None:
    """Entry point of the ``koffline`` command."""
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
