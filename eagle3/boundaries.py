"""Content-defined boundaries: where an ordered list of items is cut into shards.

A cut depends only on the items since the last one, and a natural cut falls after an item whose digest says so. Adding,
removing or changing items therefore disturbs only the shards that touch them.
"""

from collections.abc import Iterable, Iterator

from eagle3.digests import fraction


def cut_points(items: Iterable[tuple[str, int]], minimum: int, maximum: int) -> Iterator[int]:
    """Number of items in each shard, lazily.

    items: (digest, size) in order. A shard holds at least `minimum` bytes (the last one may hold less) and at most
    `maximum`, unless a single item is larger. Between the two, an item ends the shard with a chance in proportion to
    its size, so that natural cuts come about (maximum - minimum) / 4 bytes after the minimum whatever the item sizes.
    Raises ValueError when minimum > maximum.
    """
    if not 0 <= minimum <= maximum:
        raise ValueError(f"shard sizes: the minimum ({minimum}) is above the maximum ({maximum})")
    spacing = max((maximum - minimum) / 4, 1)
    count = held = 0
    for item_digest, size in items:
        if count and held + size > maximum:
            yield count
            count = held = 0
        count += 1
        held += size
        if held >= minimum and fraction(item_digest) < size / spacing:
            yield count
            count = held = 0
    if count:
        yield count
