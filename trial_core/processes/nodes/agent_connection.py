"""The agent's connection to the driver: finds the driver, and proves that it has the token."""

from __future__ import annotations

import asyncio
import logging

from trial_core.errors import LaunchError
from trial_core.processes.slots.addresses import parse_driver_address
from trial_core.processes.slots.framing import (
    HANDSHAKE_SECONDS,
    NONCE_BYTES,
    PROOF_BYTES,
    ProtocolError,
    check_proof,
    new_nonce,
    proof,
)
from trial_core.processes.slots.tls import client_context, digest_of

RETRY_SECONDS = 1.0

logger = logging.getLogger(__name__)


async def join(
    driver: str, token: bytes, wait_seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of the driver's addresses that answers.

    Raises:
        LaunchError: none answers in time, or the driver does not know the token.
    """
    addresses = parse_driver_address(driver)
    deadline = asyncio.get_running_loop().time() + wait_seconds
    has_told = False
    while True:
        problems = []
        for host, port in addresses:
            try:
                return await asyncio.wait_for(connect(host, port, token), HANDSHAKE_SECONDS)
            except ProtocolError as error:
                raise LaunchError(f"the driver at {host}:{port} is another one: {error}") from None
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                problems.append(f"{host}:{port}: {str(error) or type(error).__name__}")
        why = "; ".join(problems)
        if asyncio.get_running_loop().time() > deadline:
            raise LaunchError(
                f"no driver answered within {wait_seconds:g} s ({why}): check that "
                "it runs, that its address can be reached from here, and that the token is that "
                "of its run"
            )
        if not has_told:
            logger.info("waiting up to %g s for the driver: %s", wait_seconds, why)
            has_told = True
        await asyncio.sleep(RETRY_SECONDS)


async def connect(
    host: str, port: int, token: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a driver. Both ends prove the token.

    Raises:
        ProtocolError: the driver does not know the token, or a relay is between.
        EOFError: the driver has closed the connection: its token is another.
    """
    reader, writer = await asyncio.open_connection(host, port, ssl=client_context())
    try:
        secured = writer.get_extra_info("ssl_object")
        certificate = digest_of(secured.getpeercert(binary_form=True))
        theirs = await reader.readexactly(NONCE_BYTES)
        nonce = new_nonce()
        writer.write(proof(token, "agent", theirs, certificate) + nonce)
        check_proof(token, "driver", nonce, await reader.readexactly(PROOF_BYTES), certificate)
    except BaseException:
        writer.close()
        raise
    return reader, writer
