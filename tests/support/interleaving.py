"""Stores whose requests a test controls: two actors in a chosen order, a request that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

VERBS = frozenset({"read", "create", "write", "sizes", "objects", "delete", "remove", "clear"})
"""The methods of a storage that count as one request."""
LIMIT_SECONDS = 30.0


class _RequestHook:
    """A storage that calls `around` for each request to certain keys, which may carry it out.

    Args:
        counts: whether a request, given as verb and key or folder, is such a request.
    """

    def __init__(
        self,
        storage: Any,
        around: Callable[[Callable[[], Any]], Any],
        counts: Callable[[str, str], bool] = lambda verb, key: True,
    ) -> None:
        self._storage, self._around, self._counts = storage, around, counts

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if name not in VERBS:
            return attribute

        def request(key: str, *args: Any, **options: Any) -> Any:
            if not self._counts(name, key):
                return attribute(key, *args, **options)
            return self._around(lambda: attribute(key, *args, **options))

        return request


class FailingStore(CheckpointStore):
    """Another client of a store, whose `nth` request fails.

    Args:
        is_done: whether that request is carried out, and only its reply is lost.
    """

    def __init__(self, store: CheckpointStore, nth: int, is_done: bool = False) -> None:
        super().__init__(store.url, store.spec.options)
        self._nth, self._is_done = nth, is_done
        self.requests = 0
        hook: Any = _RequestHook(self.storage, self._count)
        self.storage = hook

    @property
    def has_failed(self) -> bool:
        """Whether the request that fails has been sent."""
        return self.requests >= self._nth

    def _count(self, request: Callable[[], Any]) -> Any:
        self.requests += 1
        if self.requests != self._nth:
            return request()
        if self._is_done:
            request()
            raise StorageError("the reply was lost")
        raise StorageError("the storage broke down")


class _Actor:
    """A thread that acts on a store and waits before each request that counts."""

    def __init__(
        self, url: str, act: Callable[[CheckpointStore], Any], counts: Callable[[str, str], bool]
    ) -> None:
        self._store, self._act = CheckpointStore(url), act
        hook: Any = _RequestHook(self._store.storage, self._in_turn, counts)
        self._store.storage = hook
        self._is_waiting = threading.Semaphore(0)  # before a request, or at the end
        self._may_continue = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.has_ended = False
        self.outcome: Any = None

    def start(self) -> None:
        self._thread.start()
        self._is_waiting.acquire(timeout=LIMIT_SECONDS)

    def step(self) -> None:
        """Carry out one request, and wait until the actor is before the next."""
        self._may_continue.release()
        self._is_waiting.acquire(timeout=LIMIT_SECONDS)

    def _in_turn(self, request: Callable[[], Any]) -> Any:
        self._is_waiting.release()
        self._may_continue.acquire(timeout=LIMIT_SECONDS)
        return request()

    def _run(self) -> None:
        try:
            self.outcome = self._act(self._store)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.outcome = error
        self.has_ended = True
        self._is_waiting.release()


def interleave(
    url: str,
    first: Callable[[CheckpointStore], Any],
    second: Callable[[CheckpointStore], Any],
    order: Iterable[bool],
) -> tuple[Any, Any]:
    """Run both actors; what each returned or raised.

    Args:
        order: whose request is next: False the first actor's, True the second's. After the order's
            end, or an actor's, the other requests follow.
    """
    outcomes = interleave_all(url, [first, second], order)
    return outcomes[0], outcomes[1]


def interleave_all(
    url: str,
    acts: Sequence[Callable[[CheckpointStore], Any]],
    order: Iterable[int],
    counts: Callable[[str, str], bool] = lambda verb, key: True,
) -> list[Any]:
    """Run several actors; what each returned or raised.

    Args:
        order: whose request is next, as the actor's index. After the order's end, or an actor's,
            the other requests follow.
        counts: whether an actor waits for its turn before a request: verb, and key or folder.
    """
    actors = [_Actor(url, act, counts) for act in acts]
    for actor in actors:
        actor.start()
    turns = iter(order)
    while alive := [actor for actor in actors if not actor.has_ended]:
        chosen = actors[next(turns, 0)]
        (chosen if not chosen.has_ended else alive[0]).step()
    return [actor.outcome for actor in actors]


def clear_memory() -> None:
    """Delete everything: each listing reads the objects and folders of all stores in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def all_orders(*requests: int) -> Iterator[tuple[int, ...]]:
    """All orders of several actors' requests.

    Args:
        requests: how many requests each actor sends.
    """
    if not any(requests):
        yield ()
    for actor, left in enumerate(requests):
        if left:
            fewer = [each - (index == actor) for index, each in enumerate(requests)]
            yield from ((actor, *rest) for rest in all_orders(*fewer))
