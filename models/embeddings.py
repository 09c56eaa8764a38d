"""Embedding tables of different sizes and loads, packed whole over devices: every device owns some of the tables.

Table-wise parallelism (Ivchenko et al., "TorchRec: a PyTorch Domain Library for Recommendation Systems", RecSys 2022):
the owner of a table looks up its rows for the whole batch, and an all-to-all takes the results to the examples. Tables
differ in rows, and in load: how many of their rows an example looks up. They lie below one another in an array
``[owners height width]``, so that owners have about equal loads:

    table     0    1    2    3            owner 0    owner 1
    rows   1000   50  400  300            table 0    table 1
    load      3    2    2    1            table 3    table 2       loads 4 and 4; 1300 rows each, 850 of them empty

The array is split along its first dim; ids are ``[batch lookups]``, the columns of table after table. What is sent is
as if every owner had as many tables and lookups as the one with most. Only rows that the batch looks up are updated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshdsl.errors import ArgumentError


@dataclass(frozen=True)
class PackedTables:
    """Where the rows of every table lie in one array ``[owners height width]``; ``pack_tables`` makes it.

    Args:
      rows: of every table.
      loads: of every table, the rows that an example looks up.
      owners: number of devices that own tables.
      owner: of every table.

    Example:
      >>> tables = PackedTables((1000, 50, 400, 300), (3, 2, 2, 1), owners=2, owner=(0, 1, 1, 0))
      >>> tables.height, tables.load_balance, round(tables.row_balance, 2)
      (1300, 1.0, 1.49)
    """

    rows: tuple[int, ...]
    loads: tuple[int, ...]
    owners: int
    owner: tuple[int, ...]

    @property
    def load_balance(self) -> float:
        """Load of the busiest owner, as a multiple of the mean."""
        return float(self._sums(self.loads).max() * self.owners / sum(self.loads))

    @property
    def row_balance(self) -> float:
        """Rows of the packed array, as a multiple of those of all tables."""
        return self.height * self.owners / sum(self.rows)

    @property
    def height(self) -> int:
        """Rows per owner in the packed array: the most that one owns."""
        return int(self._sums(self.rows).max())

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of every table among those of its owner."""
        taken, found = [0] * self.owners, []
        for owner, rows in zip(self.owner, self.rows, strict=True):
            found.append(taken[owner])
            taken[owner] += rows
        return tuple(found)

    def pack(self, tables: Sequence[jax.Array]) -> jax.Array:
        """Returns the packed array of tables ``[rows width]``.

        Raises:
          ArgumentError: a table has another number of rows than stated, or there are more or fewer tables; or they are
            not equally wide.
        """
        if [x.shape[0] for x in tables] != [*self.rows]:
            raise ArgumentError(f"tables: {[x.shape[0] for x in tables]} rows, packed for {[*self.rows]}")
        if len({x.shape[1:] for x in tables}) > 1:
            raise ArgumentError(
                f"tables: widths {[*dict.fromkeys(x.shape[1] for x in tables)]}; pack those of one width"
            )
        packed = jnp.zeros((self.owners, self.height, tables[0].shape[1]), tables[0].dtype)
        for table, owner, offset in zip(tables, self.owner, self.offsets, strict=True):
            packed = packed.at[owner, offset : offset + len(table)].set(table)
        return packed

    def unpack(self, packed: jax.Array) -> list[jax.Array]:
        """Returns the tables ``[rows width]`` of a packed array."""
        places = zip(self.owner, self.offsets, self.rows, strict=True)
        return [packed[owner, offset : offset + rows] for owner, offset, rows in places]

    def lookup(self, packed: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the sums of the rows that an example looks up in every table.

        Args:
          packed: ``[owners height width]``.
          ids: ``[batch lookups]``, as many columns for a table as its load, table after table. Ids outside their table
            count as rows of zeros.

        Returns:
          ``[batch tables width]``.

        Raises:
          ArgumentError: ``packed`` or ``ids`` has another shape, or ``ids`` are no ints.
        """
        slots = self._tables.shape[1]

        def of_owner(rows: jax.Array, at: jax.Array, slot: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(rows.at[at].get(mode="fill", fill_value=0), slot, slots)

        pooled = jax.vmap(of_owner)(
            packed, self._places(packed, ids), jnp.asarray(self._lookups.slot)
        )  # [owners slots batch width]
        first_empty_last = np.where(self._tables < 0, len(self.rows), self._tables)
        order = np.argsort(first_empty_last, axis=None, kind="stable")[: len(self.rows)]
        return pooled.reshape(-1, *pooled.shape[2:])[order].swapaxes(0, 1)

    def adagrad(
        self, packed: jax.Array, squares: jax.Array, ids: jax.Array, gradient: jax.Array, rate: float, eps: float = 1e-8
    ) -> tuple[jax.Array, jax.Array]:
        """Returns packed tables and squares after a step of row-wise Adagrad, which touches only the rows of ``ids``.

        Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
        Models" (ISCA 2022): one accumulator per row, of the mean square of its gradient; the gradients of a row that is
        looked up several times are added first.

        Args:
          packed: ``[owners height width]``.
          squares: ``[owners height]``, zeros at first.
          ids: as ``lookup`` takes them.
          gradient: ``[batch tables width]``, that of ``lookup``'s result.
          rate: learning rate.
          eps: added to the accumulators.

        Raises:
          ArgumentError: as ``lookup``.
        """
        gradients = gradient.swapaxes(0, 1)[self._tables]  # [owners slots batch width]

        def of_owner(
            rows: jax.Array, squares: jax.Array, at: jax.Array, gradients: jax.Array, slot: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            each, at = gradients[slot].reshape(-1, rows.shape[1]), at.reshape(-1)
            touched, place = jnp.unique(at, return_inverse=True, size=at.size, fill_value=self.height)
            summed = jax.ops.segment_sum(each, place, at.size)
            squares = squares.at[touched].add(jnp.mean(summed**2, 1), mode="drop")
            scale = rate / jnp.sqrt(squares.at[touched].get(mode="fill", fill_value=1.0) + eps)
            return rows.at[touched].add(-scale[:, None] * summed, mode="drop"), squares

        return jax.vmap(of_owner)(
            packed, squares, self._places(packed, ids), gradients, jnp.asarray(self._lookups.slot)
        )

    def _sums(self, values: Sequence[int]) -> NDArray[np.int64]:
        return np.bincount(self.owner, values, self.owners).astype(np.int64)

    @cached_property
    def _tables(self) -> NDArray[np.int32]:
        """The tables of every owner, ``[owners slots]``; -1 where none is."""
        owned = [[table for table, owner in enumerate(self.owner) if owner == at] for at in range(self.owners)]
        slots = max(map(len, owned))
        return np.array([tables + [-1] * (slots - len(tables)) for tables in owned], np.int32)

    @cached_property
    def _lookups(self) -> "_Lookups":
        first, offsets = np.cumsum((0, *self.loads)), self.offsets
        found = np.full((4, self.owners, int(self._sums(self.loads).max())), -1, np.int32)
        for owner, tables in enumerate(self._tables):
            lookups = [
                (first[table] + i, offsets[table], self.rows[table], slot)
                for slot, table in enumerate(tables)
                if table >= 0
                for i in range(self.loads[table])
            ]
            found[:, owner, : len(lookups)] = np.reshape(lookups, (-1, 4)).T
        column, offset, rows, slot = found
        return _Lookups(column, offset, rows, np.where(slot < 0, self._tables.shape[1], slot))

    def _places(self, packed: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the rows of every owner's lookups, ``[owners lookups batch]``; ``height`` where there is none."""
        if packed.ndim != 3 or packed.shape[:2] != (self.owners, self.height):
            raise ArgumentError(
                f"packed: {list(packed.shape)} is not [{self.owners} {self.height} width], as pack makes it"
            )
        if ids.ndim != 2 or ids.shape[1] != sum(self.loads):
            raise ArgumentError(
                f"ids: {list(ids.shape)} is not [batch {sum(self.loads)}]; give a column per row that an example looks "
                f"up, {self.loads} of the tables"
            )
        if not jnp.issubdtype(ids.dtype, jnp.integer) or not len(ids):
            raise ArgumentError(
                f"ids: {ids.dtype}{list(ids.shape)} has no integers; give those of at least one example"
            )
        each = ids.T[self._lookups.column]
        inside = (each >= 0) & (each < self._lookups.rows[..., None])
        return jnp.where(inside, each + self._lookups.offset[..., None], self.height)


@dataclass(frozen=True)
class _Lookups:
    """What every owner looks up per example, ``[owners lookups]``: as many as the busiest.

    Args:
      column: of the ids.
      offset: the first row of the table, among the owner's.
      rows: of the table; -1 where nothing is looked up.
      slot: position of the table among the owner's; their number where nothing is looked up.
    """

    column: NDArray[np.int32]
    offset: NDArray[np.int32]
    rows: NDArray[np.int32]
    slot: NDArray[np.int32]


def pack_tables(rows: Sequence[int], loads: Sequence[int], owners: int, capacity: int | None = None) -> PackedTables:
    """Returns tables packed over owners by load: the heaviest first, each to the owner of the least load so far.

    The greedy partitioner of TorchRec; Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the busiest owner
    has at most 4/3 of the least possible load if the capacity is not reached.

    Args:
      rows: of every table.
      loads: of every table, the rows that an example looks up.
      owners: number of devices that own tables.
      capacity: the most rows per owner; by default, there is no limit.

    Raises:
      ArgumentError: ``rows`` and ``loads`` are not as many positive ints; ``owners`` is not a positive int; a table
        does not fit beside those that are heavier.

    Example:
      >>> pack_tables((1000, 50, 400, 300), (3, 2, 2, 1), owners=2).owner
      (0, 1, 1, 0)
    """
    for name, values in (("rows", rows), ("loads", loads), ("owners", [owners])):
        if not values or not all(isinstance(x, Integral) and not isinstance(x, bool) and x > 0 for x in values):
            raise ArgumentError(f"{name}={values if name != 'owners' else owners!r}: must be ints of at least 1")
    if len(rows) != len(loads):
        raise ArgumentError(f"loads: {len(loads)} of them for {len(rows)} tables; give one load per table")
    sums, heights, owner = [0] * owners, [0] * owners, [0] * len(rows)
    for table in sorted(range(len(rows)), key=lambda i: (-loads[i], -rows[i])):
        fitting = [at for at in range(owners) if capacity is None or heights[at] + rows[table] <= capacity]
        if not fitting:
            raise ArgumentError(
                f"capacity={capacity}: table {table} of {rows[table]} rows fits beside no owner's {sorted(heights)}; "
                "raise it, take more owners, or split that table by rows"
            )
        least = min(fitting, key=lambda at: (sums[at], heights[at]))
        owner[table] = least
        sums[least] += loads[table]
        heights[least] += rows[table]
    return PackedTables(tuple(map(int, rows)), tuple(map(int, loads)), int(owners), tuple(owner))
