"""Windows that slide over a split dim, and the halo that a block needs.

Windows overlap, so a block of a split dim needs the edges of its neighbours: its *halo*. Let a
dim of n elements lie ``dilation`` apart, padded by ``low``; ``count`` windows start ``step``
apart and reach ``reach`` from their first place to their last. Blocks of the dim and blocks of
the windows go together if ``step * count == dilation * n``. Then every device lacks equally many
elements on either side, none where windows lie side by side (pooling, patches, 1x1 kernels).
Padding is the simplest case: each place of the result is a window of one place.
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
    def aligned(self) -> bool:
        """Whether blocks of the dim go with blocks of the windows."""
        return self.n > 1 and self.count > 1 and self.step * self.count == self.dilation * self.n

    @property
    def before(self) -> int:
        """Elements that a block lacks in front."""
        return max(0, self.low // self.dilation)

    @property
    def after(self) -> int:
        """Elements that a block lacks behind."""
        return max(0, (self.reach - self.step - self.low) // self.dilation + 1)

    def padding(self, blocks: int) -> tuple[int, int]:
        """Padding of a block with its halo, out of so many blocks; negative where it is longer than its windows."""
        low = self.low - self.before * self.dilation
        held = (self.before + self.n // blocks + self.after - 1) * self.dilation + 1
        return low, self.step * (self.count // blocks - 1) + self.reach + 1 - low - held

    def exchanges(self, port: int, dim: int) -> tuple[Exchange, ...]:
        """What the devices exchange."""
        halo = self.before or self.after
        return (Exchange("window", port, dim, before=self.before, after=self.after),) if halo else ()
