"""The messages between driver and ranks: plain data, encoded as MessagePack.

The driver sends every rank the same `Request`, and each rank replies with one `Answer`. Ranks also
send events. To end a workload early, both agree on its last step. No message is a pickle: the
receiver refuses a message that does not match its type.

`requests` has the requests and results, `envelopes` the other messages and their encoding.
"""

from __future__ import annotations

from trial_core.messages.envelopes import *  # noqa: F403 - every message is passed on
from trial_core.messages.requests import *  # noqa: F403 - likewise
