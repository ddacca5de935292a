"""Items of an iterator prepared ahead by one background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["prepared_ahead"]

Item = TypeVar("Item")


def prepared_ahead(items: Iterator[Item], num: int, start_thread: Callable[[], object] | None = None) -> Iterator[Item]:
    """The same items in the same order, up to `num` of them prepared before they are asked for.

    An error surfaces where its item would have come. Dropping this iterator ends the thread after the item
    that it is working on.

    Args:
        items: none of them may be None.
        num: 0 = no thread.
        start_thread: called once in the thread.
    """
    if num == 0:
        yield from items
        return
    pool = ThreadPoolExecutor(1, "prefetch", start_thread)
    try:
        pending = deque(pool.submit(next, items, None) for _ in range(num))
        while (item := pending.popleft().result()) is not None:
            pending.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
