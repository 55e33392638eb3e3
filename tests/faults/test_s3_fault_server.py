from __future__ import annotations

from http.client import HTTPConnection
from urllib.parse import urlsplit

from tests.support.faults.plan import Fault
from tests.support.faults.s3 import faulty_s3
from tests.support.s3 import S3Server
from tests.support.waiting import until


def test_a_hang_ends_when_the_client_disconnects(moto_s3: S3Server) -> None:
    """Also if the request's body is larger than the server's read buffer."""
    with faulty_s3(moto_s3) as endpoint:
        plan = endpoint.new_plan(Fault("hang"))
        client = HTTPConnection(urlsplit(endpoint.server().endpoint_url).netloc)
        client.request("PUT", "/bucket/key", body=bytes(2**20))
        until(lambda: plan.has_struck, "the request arrives")
        client.close()
        endpoint.wait_until_quiet()
