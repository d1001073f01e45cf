"""The commands ``koffline`` and ``python -m koffline``; Ctrl-C is quiet also while
modules are imported.
"""

import sys


def _leave_the_folder_out() -> None:
    """Take the current folder off ``sys.path``, where ``python -m`` has put it before
    everything else.

    Otherwise a file in a folder of data runs if it has the name of a module that some
    library looks for. The folder stays if this koffline lies in it and another one is
    installed: workers should run this one, too.
    """
    import os  # loaded before any folder was on the path
    from importlib.machinery import PathFinder

    if sys.flags.isolated or getattr(sys.flags, "safe_path", False) or not sys.path:
        return
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted, and then it is not on the path
        return
    if sys.path[0] not in ("", folder):
        return
    this = os.path.abspath(os.path.dirname(__file__))
    if os.path.dirname(this) == folder:
        installed = PathFinder.find_spec("koffline", sys.path[1:])
        if installed is None or installed.origin is None:
            return
        if not os.path.samefile(os.path.dirname(installed.origin), this):
            return
    del sys.path[0]


if __name__ == "__main__" and __spec__ is not None:  # before anything else is imported
    _leave_the_folder_out()

import os  # noqa: E402
import signal  # noqa: E402


def main() -> None:
    """Entry point of the ``koffline`` command."""
    for name in ("stdin", "stdout", "stderr"):
        # closed, as by >&-: the next file opened would take its place
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(os.open(os.devnull, os.O_RDWR), "r+", encoding="utf-8"),
            )
            os.set_inheritable(getattr(sys, name).fileno(), True)
    # OpenBLAS ends its threads at every fork and starts them again, although koffline
    # computes with one each; it reads this when NumPy is loaded
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
