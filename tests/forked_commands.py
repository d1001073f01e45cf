"""koffline's command in processes of their own, each forked from one that has imported
koffline and torch: its start takes milliseconds instead of seconds.

Such a process has its own folder, streams, signals and exit code. What Python decides
at its start (its encodings, the modules of its path) is decided once, by the
environment of the process that is forked, and at its end the interpreter is not taken
apart. What depends on either needs a process of its own.

A fork copies only the thread that asks for it, and with it the locks that other threads
hold. The process that is forked has therefore one thread, which it makes sure of, and
opens no file of a log.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_SERVER = """
import atexit, importlib, json, os, signal, sys

from koffline.__main__ import main

for name in (
    "koffline.cli.build",
    "koffline.cli.data",
    "koffline.cli.evaluate",
    "koffline.cli.learn",
    "koffline.cli.models",
    "koffline.builders.rollouts",
    "koffline.ope.evaluation",
    "koffline.online.run",
    "koffline.report.plots",
    "koffline.train.run",
    "koffline.train.sweep",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "torch._dynamo",  # imported by the first optimiser
):
    importlib.import_module(name)
threads = os.listdir("/proc/self/task") if sys.platform == "linux" else []
if len(threads) > 1:
    raise SystemExit(f"{len(threads)} threads run: a fork would copy their locks")
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    os._exit(0)

signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir(bytes.fromhex(request["folder"]))
streams = ((os.devnull, os.O_RDONLY), *((path, os.O_WRONLY) for path in request["streams"]))
for descriptor, (path, flag) in enumerate(streams):
    opened = os.open(path, flag)
    os.dup2(opened, descriptor)
    os.close(opened)
os.environ.update(request["variables"])
sys.argv = ["koffline", *(os.fsdecode(bytes.fromhex(word)) for word in request["words"])]
code = 1
try:
    exec(request["before"], {"__name__": "__main__"})
    main()
except SystemExit as error:
    code = error.code or 0
except BaseException:
    sys.excepthook(*sys.exc_info())
atexit._run_exitfuncs()
try:
    sys.stdout.flush()
    sys.stderr.flush()
except OSError:
    code = 120  # as the interpreter says it
os._exit(code)
"""


class ForkedCommands:
    """Runs commands in processes that are forked from one process; close it at the
    end.

    environment: variables of that process besides those of this one.
    """

    def __init__(self, environment: Mapping[str, str], scratch: Path) -> None:
        self._streams = (scratch / "stdout", scratch / "stderr")
        self._log = scratch / "log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ONE_THREAD, **environment},
                text=True,
            )
        answer = self._answer()
        assert answer == "ready"

    def run(
        self,
        words: list[str],
        folder: Path,
        *,
        before: str = "",
        variables: Mapping[str, str] | None = None,
        stdout: str | None = None,
        stderr: str | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``koffline WORDS`` in a folder, as subprocess.run does.

        before: Python code that runs in the process before the command; instead of it,
            where the code ends with ``raise SystemExit``.
        stdout, stderr: files to write to, such as /dev/full; without, what the command
            writes is in the result.
        """
        for path in self._streams:
            path.write_bytes(b"")
        targets = (stdout or str(self._streams[0]), stderr or str(self._streams[1]))
        request = {
            "words": [os.fsencode(word).hex() for word in words],
            "folder": os.fsencode(folder).hex(),
            "streams": targets,
            "before": before,
            "variables": dict(variables or {}),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = int(self._answer())
        outputs = [path.read_bytes() for path in self._streams]
        return subprocess.CompletedProcess(words, code, outputs[0], outputs[1])

    def close(self) -> None:
        """End the process that commands are forked from."""
        self._server.communicate()

    def _answer(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline().strip()
        if not line:
            code = self._server.wait()
            reason = self._log.read_text(errors="replace")
            raise AssertionError(
                f"the process that commands are forked from has ended ({code}): {reason}"
            )
        return line
