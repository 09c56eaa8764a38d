"""Windows that slide over a split dim, and the halo that a block needs.

Windows overlap, so a block of a split dim needs the edges of its neighbours: its *halo*. Let the n elements of a dim be
``dilation`` apart and padded by ``low``; ``count`` windows start ``step`` apart and extend by ``reach`` from their
first place to their last. Blocks of the dim match blocks of the windows if ``step * count == dilation * n``. Then every
device needs equally many elements on either side, none where windows do not overlap (pooling, patches, 1x1 kernels).
Else the windows drift away from the blocks, by ``step * count - dilation * n`` over the whole dim: the devices fetch
the largest halo that any of them needs, and each takes its own part. Padding and slicing are the simplest cases: each
place of the result is a window of one place.
"""

from dataclasses import dataclass

from meshdsl.layouts.exchange import Exchange


@dataclass(frozen=True)
class Sliding:
    """Windows over one dim (see the module docstring).

    Args:
      n: elements of the dim. count: windows.
    """

    n: int
    count: int
    step: int
    reach: int
    low: int
    dilation: int

    @property
    def splits(self) -> bool:
        """Whether windows run on blocks: without drift, or with a halo that is cheaper than a gather."""
        near = self.dilation == 1 and 2 * (self.before + self.after) <= self.n
        return self.n > 1 and self.count > 1 and (self.drift == 0 or near)

    @property
    def drift(self) -> int:
        """The excess of the length of all windows over the length of the dim."""
        return self.step * self.count - self.dilation * self.n

    @property
    def hidden(self) -> bool:
        """Whether there is no drift and no window covers an element: the result is padding only."""
        shown = -self.low <= self.dilation * (self.n - 1) and self.low <= self.step * (self.count - 1) + self.reach
        return self.drift == 0 and not shown

    @property
    def before(self) -> int:
        """Elements that a block needs from those in front of it."""
        return 0 if self.hidden else max(0, (self.low + max(0, -self.drift)) // self.dilation)

    @property
    def after(self) -> int:
        """Elements that a block needs from those behind it."""
        lacking = (self.reach - self.step - self.low + max(0, self.drift)) // self.dilation + 1
        return 0 if self.hidden else max(0, lacking)

    def extent(self, blocks: int) -> int:
        """Places that the windows of one of ``blocks`` blocks of the result cover."""
        return self.step * (self.count // blocks - 1) + self.reach + 1

    def padding(self, blocks: int) -> tuple[int, int]:
        """Padding of a block with its halo, without drift; negative if it is longer than its windows."""
        low = self.low - self.before * self.dilation
        held = (self.before + self.n // blocks + self.after - 1) * self.dilation + 1
        return low, self.extent(blocks) - low - held

    def exchanges(self, port: int, dim: int) -> tuple[Exchange, ...]:
        """The exchanges between devices that fetch the halo."""
        halo = self.before or self.after
        return (Exchange("window", port, dim, before=self.before, after=self.after),) if halo else ()


@dataclass(frozen=True)
class Spreading:
    """Windows that write to one of the places that they cover, as in the gradient of max pooling.

    To compute its block, a device needs every window that overlaps it, including its neighbours' (the *windows* in
    front and behind), and all elements under these windows (the *elements* in front and behind), since these determine
    the place that each window writes to.

    Args:
      n: elements of the dim. count: windows, ``step`` apart, of ``width`` elements, the first at ``-low``.
    """

    n: int
    count: int
    step: int
    width: int
    low: int

    @property
    def splits(self) -> bool:
        """Whether blocks of the dim match blocks of the windows."""
        return self.n > 1 and self.count > 1 and self.step * self.count == self.n and 0 <= self.low < self.width

    @property
    def windows(self) -> tuple[int, int]:
        """Windows of the blocks in front and behind that overlap a block."""
        return (self.width - 1 - self.low) // self.step, -(-self.low // self.step)

    @property
    def elements(self) -> tuple[int, int]:
        """Elements in front of a block and behind it that are covered by its windows and by ``windows``."""
        before, after = self.windows
        return before * self.step + self.low, max(0, (after - 1) * self.step - self.low + self.width)

    def exchanges(self, dim: int) -> tuple[Exchange, ...]:
        """The exchanges between devices: of windows (the first operand) and of elements (the second)."""
        ends = enumerate((self.windows, self.elements))
        return tuple(Exchange("window", port, dim, before=a, after=b) for port, (a, b) in ends if a or b)
