"""Roundness: how well the axes of a mesh can split a dim, by its length.

    over axes of     2, 4 or 8        3               2 and 3
    2048             2048             1               2048
    2187             1                2187            2187       a power of three
    2186             2                1               2          2 times a prime

A dim without its first element is as easy to split as the whole if it lies on the whole's grid
(``meshdsl.trace.passes.alignment``). So of lengths that differ a little, the roundest one has to be found. Other sizes
than powers of two count only if the mesh has them. Meshes of powers of two are all treated as one, so that one trace
serves them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

ENOUGH = 4  # devices over which at least a length has to divide to be round, on a mesh of powers of two


@dataclass(frozen=True)
class Roundness:
    """The measure of a mesh.

    Args:
      sizes: of the axes that may split a dim, in order.
      enough: devices over which at least a length has to divide to be round.
    """

    sizes: tuple[int, ...] = (2, 2)
    enough: int = ENOUGH

    @classmethod
    def of(cls, sizes: Iterable[int]) -> "Roundness":
        """Returns the measure of a mesh with axes of these sizes."""
        several = tuple(sorted(n for n in sizes if n > 1))
        return cls(several, min(several)) if any(n & (n - 1) for n in several) else POWERS_OF_TWO

    def devices(self, n: int) -> int:
        """Returns the most devices that split ``n`` evenly: a product of axes."""
        return _devices(self.sizes, n)

    def is_round(self, n: int) -> bool:
        """Returns whether enough devices split ``n`` evenly."""
        return self.devices(n) >= self.enough

    def degree(self, n: int) -> int:
        """Returns the largest divisor of ``n`` whose prime factors are those of the axes that split it evenly."""
        return _degree(self.sizes, n)

    def highest_degree(self, first: int, last: int) -> int:
        """Returns the highest degree of the numbers from ``first`` to ``last``, both positive."""
        degrees = sorted(_products(_primes(self.sizes), last), reverse=True)
        return next(m for m in degrees if last - last % m >= first and (m == 1 or self.degree(m) == m))


POWERS_OF_TWO = Roundness()


@cache
def _devices(sizes: tuple[int, ...], n: int) -> int:
    if n == 0:  # nothing to split
        return 1
    products = {1}
    for size in sizes:
        products |= {k * size for k in products}
    return max(k for k in products if n % k == 0)


@cache
def _degree(sizes: tuple[int, ...], n: int) -> int:
    found = 1
    for p in _primes(tuple(k for k in sizes if n and n % k == 0)):
        while n % (found * p) == 0:
            found *= p
    return found


def _primes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({p for size in sizes for p in prime_factors(size)}))


def prime_factors(n: int) -> list[int]:
    """Returns the prime factors of a positive number, each as often as it divides it."""
    found, p = list[int](), 2
    while p * p <= n:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found + [n] * (n > 1)


def _products(primes: tuple[int, ...], last: int) -> Iterator[int]:
    """Yields the numbers up to ``last`` whose prime factors are these."""
    if not primes:
        yield 1
        return
    power = 1
    while power <= last:
        yield from (power * m for m in _products(primes[1:], last // power))
        power *= primes[0]
