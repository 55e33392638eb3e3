"""In the place of `server_script.py`: answers every request or none, or ends during its start."""

import os
import select
import signal
import socket
import sys
from pathlib import Path

DOES, _, ONCE = os.environ["STAND_IN_SERVER"].partition(" ")
if DOES == "die" and not (ONCE and Path(ONCE).exists()):
    if ONCE:
        Path(ONCE).write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
if DOES == "end":
    sys.exit(3)
if DOES == "hang":
    while True:
        signal.pause()
listener = socket.socket(fileno=int(sys.argv[1]))
while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
    with listener.accept()[0] as connection:
        connection.recv(65536)
        if DOES == "accept":
            sys.exit(3)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
