"""One ``vllm serve`` process: started on a free port of this machine, watched, asked for its metrics, and stopped with all its children."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

MODEL_NAME = "SmolLM2-135M-Instruct"
READY_LIMIT_S = 300
STOP_LIMIT_S = 30
CHILDREN_LIMIT_S = 5
_FEW_CORES = 8
_METRIC = re.compile(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


class ServerError(RuntimeError):
    """The server ended or did not become ready; the message ends with its last log lines."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _bound_cores() -> str:
    """Value of VLLM_CPU_OMP_THREADS_BIND: all cores on a small machine, where vLLM's own choice leaves one of them idle."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores)) if len(cores) <= _FEW_CORES else "auto"


class Server:
    """``vllm serve`` as a context manager; entering it starts the process, ``wait_ready`` waits for the first answer.

    ``backend`` is the value of VLLM_ATTENTION_BACKEND, None for stock vLLM. ``environment`` is added to this process's own.
    """

    def __init__(
        self,
        model: Path,
        backend: str | None,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        vllm = str(Path(sys.executable).with_name("vllm"))
        fixed = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        self.command = [vllm, "serve", str(model), *fixed, *arguments]
        own = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": _bound_cores(),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **({} if backend is None else {"VLLM_ATTENTION_BACKEND": backend}),
            **(environment or {}),
        }
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_ATTENTION_BACKEND"}
        self.environment = {**inherited, **own}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, on_wait: Callable[[float], None] = lambda seconds: None) -> float:
        """Seconds until /health answered; ``on_wait(seconds so far)`` is called about twice a second. Raises ServerError."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < READY_LIMIT_S:
            self.check_alive()
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            on_wait(waited)
            time.sleep(0.5)
        raise ServerError(f"the server was not ready within {READY_LIMIT_S} s; its last lines:\n{self.tail()}")

    def check_alive(self) -> None:
        """Raises ServerError if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ServerError(f"the server ended with code {code}; its last lines:\n{self.tail()}")

    def tail(self, num_lines: int = 25) -> str:
        """Its last log lines."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def find_in_log(self, text: str) -> str | None:
        """The part of the first log line with ``text`` that begins there."""
        for line in self.log.read_text(errors="replace").splitlines():
            if text in line:
                return line[line.index(text) :]
        return None

    def metrics(self) -> dict[str, float]:
        """All vLLM metrics without their labels (there is one engine), e.g. {"vllm:num_requests_running": 3.0, ...}."""
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=30).text)

    def stop(self) -> None:
        """End the server: SIGTERM, time for it and its children to clean up, and SIGKILL to what is left of its process group."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        for _ in range(round(CHILDREN_LIMIT_S / 0.1)):
            if not _group_lives(self._process.pid):
                break
            time.sleep(0.1)
        else:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that ``with Server(...)`` stops its server then too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name: value}, labels dropped; of several series with one name, their sum."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found
