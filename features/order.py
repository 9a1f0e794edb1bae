"""Pure functions behind the stream's order: hashing, the Feistel permutation, the draw of anchors.

All arithmetic is on unsigned 64-bit integers of NumPy and its own generator is not used, so that the same seed gives
the same order with any version of NumPy on any machine.
"""

import hashlib

import numpy as np

_U64 = np.uint64


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: a bijection of uint64 whose output bits all depend on all input bits."""
    x = x.astype(_U64)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def key64(*parts: object) -> int:
    """64-bit key of the parts' text."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "little")


def permuted(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Images (int64) of `index` (values in [0, n)) under the permutation of [0, n) that belongs to (seed, epoch).

    A balanced Feistel network of 8 rounds on 2b bits, 4^b >= n, walked until the value falls below n (fewer than four
    walks on average). Any index is found at once: no table of n entries, no state.
    """
    half = 1
    while 4**half < n:
        half += 1
    mask, shift = _U64(2**half - 1), _U64(half)
    keys = [_U64(key64("order", seed, epoch, r)) for r in range(8)]
    x = np.asarray(index).astype(_U64)
    todo = np.ones(x.shape, dtype=bool)
    while todo.any():
        left, right = x[todo] >> shift, x[todo] & mask
        for k in keys:
            left, right = right, left ^ (mix(right ^ k) & mask)
        x[todo] = (left << shift) | right
        todo = x >= _U64(n)
    return x.astype(np.int64)


def draw_anchors(
    legal: np.ndarray,
    count: int,
    seed: int,
    epoch: int,
    document: str,
    visited: np.ndarray | None = None,
    visited_share: float = 0.0,
) -> np.ndarray:
    """Up to `count` of the `legal` positions (sorted int64), without replacement, sorted.

    Each position gets a hash of (seed, epoch, document, position) and the smallest win. Of `count`, a share comes
    from the legal ones among `visited` (as many as there are) and the rest from all others.
    """
    if visited is None and len(legal) <= count:
        return legal
    rank = mix(mix(legal.astype(_U64)) ^ _U64(key64("anchors", seed, epoch, document)))
    order = legal[np.argsort(rank, kind="stable")]
    if visited is None:
        return np.sort(order[:count])
    preferred = np.isin(order, np.asarray(visited))
    chosen = order[preferred][: round(count * visited_share)]
    others = order[~np.isin(order, chosen)]
    return np.sort(np.concatenate([chosen, others[: count - len(chosen)]]))


def spread_rows(need: np.ndarray, budget: int) -> np.ndarray:
    """Rows granted to each document so that they fit `budget`: the shorter ones whole, the longest cut to one length.

    need [100, 900, 500], budget 1000 -> [100, 450, 450].
    """
    limit, left, remaining = 0, budget, len(need)
    for i, rows in enumerate(np.sort(need)):
        limit = left // (remaining - i)
        if rows > limit:
            break
        left -= int(rows)
    else:
        return need
    return np.minimum(need, limit)
