"""Reads frames from the connections between driver and agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trial_core.slots.framing import HEADER, frame_length


async def read_frame(reader: asyncio.StreamReader, heard: Callable[[], None]) -> bytes:
    """The next frame's payload.

    Args:
        heard: called whenever bytes come: a large frame on a slow network is no silence.

    Raises:
        EOFError, OSError: the connection has ended.
        ProtocolError: the frame is too long.
    """
    length = frame_length(await _read(reader, HEADER.size, heard))
    return await _read(reader, length, heard)


async def _read(reader: asyncio.StreamReader, count: int, heard: Callable[[], None]) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = await reader.read(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
        heard()
    return bytes(data)
