"""Windows that slide over a split dim, and the halo that a block needs.

Windows overlap, so a block of a split dim needs the edges of its neighbours: its *halo*. Let a
dim of n elements lie ``dilation`` apart, padded by ``low``; ``count`` windows start ``step``
apart and reach ``reach`` from their first place to their last. Blocks of the dim and blocks of
the windows go together if ``step * count == dilation * n``. Then every device lacks equally many
elements on either side, none where windows lie side by side (pooling, patches, 1x1 kernels).
Otherwise the windows drift away from the blocks, by ``step * count - dilation * n`` over the
whole dim: the devices fetch as much as any of them lacks, and each takes its own part of that.
Padding and slicing are the simplest cases: each place of the result is a window of one place.
"""

from dataclasses import dataclass

from meshdsl.layouts.exchange import Exchange


@dataclass(frozen=True)
class Sliding:
    """Windows over one dim; see above.

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
        """Whether windows run on blocks: nothing drifts, or so little that the halo is no more than a gather."""
        near = self.dilation == 1 and 2 * (self.before + self.after) <= self.n
        return self.n > 1 and self.count > 1 and (self.drift == 0 or near)

    @property
    def drift(self) -> int:
        """By how much all windows together are longer than the dim."""
        return self.step * self.count - self.dilation * self.n

    @property
    def hidden(self) -> bool:
        """Whether nothing drifts and no window shows an element: all is padding, and nothing is lacking."""
        shown = -self.low <= self.dilation * (self.n - 1) and self.low <= self.step * (self.count - 1) + self.reach
        return self.drift == 0 and not shown

    @property
    def before(self) -> int:
        """Elements that a block lacks in front."""
        return 0 if self.hidden else max(0, (self.low + max(0, -self.drift)) // self.dilation)

    @property
    def after(self) -> int:
        """Elements that a block lacks behind."""
        lacking = (self.reach - self.step - self.low + max(0, self.drift)) // self.dilation + 1
        return 0 if self.hidden else max(0, lacking)

    def extent(self, blocks: int) -> int:
        """Places that the windows of one block of the result cover, out of so many blocks."""
        return self.step * (self.count // blocks - 1) + self.reach + 1

    def padding(self, blocks: int) -> tuple[int, int]:
        """Padding of a block with its halo, where nothing drifts; negative where it is longer than its windows."""
        low = self.low - self.before * self.dilation
        held = (self.before + self.n // blocks + self.after - 1) * self.dilation + 1
        return low, self.extent(blocks) - low - held

    def exchanges(self, port: int, dim: int) -> tuple[Exchange, ...]:
        """What the devices exchange."""
        halo = self.before or self.after
        return (Exchange("window", port, dim, before=self.before, after=self.after),) if halo else ()


@dataclass(frozen=True)
class Spreading:
    """Windows that write back to the places they cover, as the gradient of a pooling does.

    To write its block, a device needs every window that reaches into it, some of which are its
    neighbours' (the *windows* in front and behind), and all that these windows see (the
    *elements* in front and behind), for only then it knows at which place each of them writes.

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
        """Whether blocks of the dim go with blocks of the windows."""
        return self.n > 1 and self.count > 1 and self.step * self.count == self.n and 0 <= self.low < self.width

    @property
    def windows(self) -> tuple[int, int]:
        """Windows in front of a block and behind it that reach into it."""
        return (self.width - 1 - self.low) // self.step, -(-self.low // self.step)

    @property
    def elements(self) -> tuple[int, int]:
        """Elements in front of a block and behind it that its windows see, those in front and behind included."""
        before, after = self.windows
        return before * self.step + self.low, max(0, (after - 1) * self.step - self.low + self.width)

    def exchanges(self, dim: int) -> tuple[Exchange, ...]:
        """What the devices exchange: windows, which are the first operand, and elements, the second."""
        ends = enumerate((self.windows, self.elements))
        return tuple(Exchange("window", port, dim, before=a, after=b) for port, (a, b) in ends if a or b)
