"""This process's connection to a Ray cluster, which must demand a token of its clients."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from trial_core.common.text_format import last_line
from trial_core.errors import LaunchError

CONNECT_SECONDS = 120.0
POLL_SECONDS = 0.2

_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_ADMITTED, _REFUSED = "admitted", "refused"

_KNOCK = f"""
import os, sys
sys.path.pop(0)  # the working folder may be a stranger's
import ray

def ping_client_server(host):
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.ray_client_pb2 import ClusterInfoRequest, ClusterInfoType
    from ray.core.generated.ray_client_pb2_grpc import RayletDriverStub
    try:
        stub = RayletDriverStub(init_grpc_channel(host))
        stub.ClusterInfo(ClusterInfoRequest(type=ClusterInfoType.PING))
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise ray.exceptions.AuthenticationError("") from error
        raise ConnectionError(error.details()) from error

def ping_cluster(address):
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient
    GcsClient(address=canonicalize_bootstrap_address(address))

protocol, _, host = sys.argv[1].rpartition("://")
try:
    ping_client_server(host) if protocol else ping_cluster(host)
except ray.exceptions.AuthenticationError:
    answer = "{_REFUSED}"
except Exception as error:
    answer = str(error)
else:
    answer = "{_ADMITTED}"
print(answer, flush=True)
os._exit(0)
"""
"""Connects to a cluster. It runs in a process, because Ray reads the mode of authentication
once, and because a refused or unreachable ``ray.init`` tries for many minutes."""


class Deadline:
    """The end of a wait, which may also be aborted."""

    def __init__(self, seconds: float, should_abort: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._should_abort = should_abort

    def left_seconds(self) -> float:
        """0 if the time is over or the run was given up."""
        return 0.0 if self._should_abort() else max(0.0, self._end - time.monotonic())

    def how(self) -> str:
        return (
            "it was given up"
            if self._should_abort()
            else f"it took longer than {self._seconds:g} s"
        )


def check_admission(
    address: str, is_insecure: bool, seconds: float, should_abort: Callable[[], bool]
) -> None:
    """Connect as this process will, and as a stranger without a token.

    Raises LaunchError if the cluster does not admit this process, or admits the stranger.
    """
    stranger = {name: value for name, value in os.environ.items() if name not in _TOKEN_VARIABLES}
    stranger["RAY_AUTH_MODE"] = "disabled"
    deadline = Deadline(min(seconds, CONNECT_SECONDS), should_abort)
    clients = [dict(os.environ)] if is_insecure else [dict(os.environ), stranger]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _KNOCK, address],
            env=each, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for each in clients
    ]  # fmt: skip
    try:
        while any(each.poll() is None for each in processes) and deadline.left_seconds():
            time.sleep(POLL_SECONDS)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    said = [each.communicate() for each in processes]
    answers = [last_line(out) or last_line(err) or deadline.how() for out, err in said]
    if answers[0] == _REFUSED:
        raise LaunchError(
            f"the Ray cluster at {address} refuses this process, which has no token or another "
            "one; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with its token"
        )
    if answers[0] != _ADMITTED:
        raise LaunchError(_unreachable(address, answers[0]))
    if answers[1:] == [_ADMITTED]:
        raise LaunchError(
            f"the Ray cluster at {address} admits clients without a token: all who reach its ports "
            "can run programs on it; start it with RAY_AUTH_MODE=token (docs.ray.io, token "
            "authentication), or say insecure: true in the experiment"
        )
    if answers[1:] not in ([], [_REFUSED]):
        raise LaunchError(
            f"it is unknown whether the Ray cluster at {address} needs a token. To a client "
            f"without one it said: {answers[1]}"
        )


def _unreachable(address: str, why: str) -> str:
    return (
        f'no connection to a Ray cluster at "{address}": {why}. Start one on this machine '
        "(ray start --head, or --address=… to join one), or give its address as host:port or "
        "ray://host:port"
    )


class Connection:
    """This process's connection to a Ray cluster, which all runs in it share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._is_ours = False

    def enter(self, address: str) -> None:
        """Connect, unless this process is connected. Raises LaunchError if Ray refuses."""
        ray = import_ray()
        with self._lock:
            if not ray.is_initialized():
                on_sigterm = signal.getsignal(signal.SIGTERM)
                try:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
                    raise LaunchError(_unreachable(address, last_line(str(error)))) from error
                finally:
                    # ray.init has set another handler: a stop would then not save first.
                    is_main = threading.current_thread() is threading.main_thread()
                    if is_main and on_sigterm is not None:
                        signal.signal(signal.SIGTERM, on_sigterm)
                self._is_ours = True
            self._runs += 1

    def leave(self) -> None:
        """Disconnect after the last run, unless the user's own code has connected."""
        with self._lock:
            self._runs -= 1
            if self._is_ours and not self._runs:
                self._is_ours = False
                import_ray().shutdown()


connection = Connection()


def import_ray() -> Any:
    """Ray, which only this provider needs. Raises LaunchError if it is not installed."""
    # Ray prints pages about a dead machine even if log_to_driver=False; the run says it in a line.
    # The variable is read when Ray is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated|marked dead because")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(
            f"resources.engine: ray needs Ray, which cannot be imported ({error}): "
            'pip install "trialflow[ray]"'
        ) from error
