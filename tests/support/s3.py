"""S3 servers for tests, each on a free port of 127.0.0.1, as context managers and pytest fixtures.

``moto_s3`` is moto, an imitation on a thread of this process. ``ceph_s3`` is a real gateway (Ceph,
from the distribution's packages); tests that use it have the marker ``gateway``. If its programs
are not installed, these tests are skipped; TRIALFLOW_TEST_GATEWAY=require (as in CI) fails them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

CEPH_SCRIPT = Path(__file__).with_name("ceph_s3.sh")
CEPH_PROGRAMS = (
    "ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin",
)  # fmt: skip
INSTALL_COMMAND = "apt-get install -y --no-install-recommends ceph-mon ceph-osd radosgw ceph-common"


REQUEST = re.compile(r'beast: \w+: (\S+) - .*? "([A-Z]+) /(\S*) HTTP/[\d.]+" 2\d\d ')
"""A request in the gateway's log that succeeded: its client's address, method and target."""


class Request(NamedTuple):
    """A request for an object.

    Attributes:
        client: its address.
        url: of the object: ``s3://bucket/key``.
    """

    client: str
    method: str
    url: str


@dataclass(frozen=True)
class S3Server:
    """A running S3 server, and the credentials of a user with all rights.

    Attributes:
        log: of the gateway, which names each request; None: of moto.
    """

    endpoint_url: str
    access_key: str
    secret_key: str
    log: Path | None = None

    def requests(self) -> list[Request]:
        """The requests that have succeeded, in order. The log may lag by a moment."""
        assert self.log is not None, "moto has no log"
        return [
            Request(client, method, f"s3://{urllib.parse.unquote(target.partition('?')[0])}")
            for client, method, target in REQUEST.findall(self.log.read_text())
        ]

    def admin(self, *command: str) -> None:
        """Administer the gateway's users: ``("user", "suspend", "--uid=other")``."""
        assert self.log is not None, "moto has no users"
        conf = self.log.parent.parent / "ceph.conf"
        gateway = ("radosgw-admin", "--conf", conf, "--name", "client.rgw")
        done = subprocess.run([*gateway, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a storage on this server."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": self.access_key,
            "secret": self.secret_key,
        }

    def new_bucket(self) -> str:
        """Create an empty bucket; return its URL (``s3://test-…``)."""
        url = f"s3://test-{uuid.uuid4().hex[:12]}"
        S3FileSystem(**self.options).mkdir(url)
        return url


def _one_at_a_time(put: Callable[[S3Response], Any]) -> Callable[[S3Response], Any]:
    """Writes of objects under a lock: moto checks the condition of a write before it writes."""
    lock = threading.Lock()

    def locked(response: S3Response) -> Any:
        with lock:
            return put(response)

    return locked


# For good: servers may end in any order.
S3Response.put_object = _one_at_a_time(S3Response.put_object)  # type: ignore[assignment,method-assign]


@contextmanager
def moto_server(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Moto on a thread of this process. It accepts any credentials."""
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}", "moto-access-key", "moto-secret-key")
    finally:
        server.stop()


@contextmanager
def ceph_gateway(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """A real S3 gateway that stores in memory; starts in about 2 s.

    Args:
        address: where it listens.

    Raises:
        RuntimeError: the gateway did not start; says why.
    """
    folder = tempfile.mkdtemp(prefix="ceph-s3-")
    # The daemons have no parent process. A watcher stops them when the pipe from this process is
    # closed, also by a kill. The new session protects the watcher from Ctrl-C.
    watcher = subprocess.Popen(
        ["bash", "-c", 'read -r _; "$0" down "$1"; rm -rf "$1"', str(CEPH_SCRIPT), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        started = subprocess.run(
            [str(CEPH_SCRIPT), "up", folder, "0"],
            env=os.environ
            | {
                "CEPH_S3_ADDRESS": address,
                "CEPH_S3_ACCESS_KEY": "ceph-access-key",
                "CEPH_S3_SECRET_KEY": "ceph-secret-key",
                "CEPH_S3_STORE": "memstore",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if started.returncode != 0:
            raise RuntimeError(f"the S3 gateway did not start: {started.stderr.strip()}")
        log = Path(folder, "log", "radosgw.log")
        yield S3Server(started.stdout.strip(), "ceph-access-key", "ceph-secret-key", log)
    finally:
        watcher.communicate()


def missing_ceph_programs() -> list[str]:
    """The gateway's programs that are not installed."""
    return [program for program in CEPH_PROGRAMS if shutil.which(program) is None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a gateway test if the gateway is not installed, or fail it if one is required."""
    if item.get_closest_marker("gateway") is None or not (missing := missing_ceph_programs()):
        return
    reason = f"not installed: {', '.join(missing)}; to run this test: {INSTALL_COMMAND}"
    if os.environ.get("TRIALFLOW_TEST_GATEWAY") == "require":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    """Moto, one server per session; create a bucket for each test."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def ceph_s3() -> Iterator[S3Server]:
    """A real S3 gateway, one per session; create a bucket for each test."""
    with ceph_gateway() as server:
        yield server
