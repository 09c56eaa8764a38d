"""Mesh: ordered, named axes of devices, with or without devices behind them.

Only ``Mesh.auto``, which asks for the devices at hand, imports jax.
"""

from collections.abc import Callable, Iterator
from math import prod

from meshdsl.errors import LayoutError, NotationError, nearest
from meshdsl.layouts.notation import parse_mesh
from meshdsl.layouts.topology import Topology
from meshdsl.layouts.topology import topology as preset


class Mesh:
    """Named axes of devices, outermost (slowest links) first.

    A mesh names axes only; planning needs no devices. ``names`` and ``sizes`` are in the order of the axes.

    Args:
      topology: links and speeds: a preset's name, a :class:`Topology`, or None for that of the devices at hand, which
        is found when something is planned; until then, ``mesh.topology`` is ``cpu``.
      sizes: devices per axis, by its name.

    Raises:
      NotationError: a name or size is not that of an axis.
      LayoutError: the axes do not fit the topology's links.

    Example:
      >>> mesh = md.Mesh(data=4, model=2, topology="dgx-h100")
      >>> mesh.size
      8
    """

    __slots__ = ("_hash", "names", "sizes_by_name", "states_topology", "topology")
    sizes_by_name: dict[str, int]
    names: tuple[str, ...]
    topology: Topology
    states_topology: bool
    _hash: int

    def __init__(self, *, topology: Topology | str | None = None, **sizes: int) -> None:
        bad = [_size_fault(name, size) for name, size in sizes.items() if not _is_size(size)]
        bad += [f"{name!r} is no axis name; write letters, digits and _" for name in sizes if not name.isidentifier()]
        if bad or not sizes:
            raise NotationError("; ".join(bad) or "a mesh has at least one axis, as in Mesh(data=8)")
        named = topology if isinstance(topology, Topology) else preset("cpu" if topology is None else topology)
        named.check_shape(sizes.items())
        object.__setattr__(self, "sizes_by_name", dict(sizes))
        object.__setattr__(self, "names", tuple(sizes))
        object.__setattr__(self, "topology", named)
        object.__setattr__(self, "states_topology", topology is not None)
        object.__setattr__(self, "_hash", hash((tuple(sizes.items()), named)))

    @classmethod
    def parse(cls, text: str, topology: Topology | str | None = None) -> "Mesh":
        """Returns the mesh written as ``"data=4,model=2"`` (commas or spaces)."""
        sizes = parse_mesh(text)
        if "topology" in sizes:
            raise NotationError(f"an axis cannot be called 'topology', as in {text!r}; Mesh(topology=...) is its costs")
        return cls(topology=topology, **sizes)

    @classmethod
    def auto(cls, axis: str = "data", *, topology: Topology | str | None = None, **inner: int) -> "Mesh":
        """Returns the mesh of all devices at hand, those of ``jax.devices()``.

        Args:
          axis: the outermost axis, which takes the devices that the others leave.
          topology: as in ``Mesh``.
          inner: sizes of further axes, by their names.

        Raises:
          NotationError: a name or size is not that of an axis.
          LayoutError: the devices do not divide into these axes.

        Example:
          >>> md.Mesh.auto(), md.Mesh.auto("fsdp", model=2)      # on 8 devices
          (Mesh(data=8), Mesh(fsdp=4, model=2))
        """
        import jax

        if not isinstance(axis, str):
            raise NotationError(f"Mesh.auto({axis!r}): not the name of an axis; write Mesh.auto('data', model=2)")
        if axis in inner:
            raise NotationError(f"Mesh.auto({axis}=...): the outermost axis {axis!r} takes the devices that are left")
        count, inside = jax.device_count(), cls(topology=topology, **{axis: 1}, **inner).size
        if count % inside:
            given = ", ".join(f"{name}={size}" for name, size in inner.items())
            raise LayoutError(
                f"Mesh.auto({given}): {count} devices do not divide into groups of {inside}; the sizes have to "
                f"multiply to one of {', '.join(str(n) for n in range(1, count + 1) if count % n == 0)}"
            )
        return cls(topology=topology, **{axis: count // inside}, **inner)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices per axis, in the order of ``names``."""
        return tuple(self.sizes_by_name.values())

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return prod(self.sizes)

    def axis(self, name: str) -> int:
        """Returns the size of one axis; raises LayoutError with the nearest name if there is none."""
        if name not in self.sizes_by_name:
            raise LayoutError(f"no axis {name!r} in mesh {self}{nearest(name, self.names)}")
        return self.sizes_by_name[name]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.sizes_by_name.items())

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh) and (tuple(self), self.topology) == (tuple(other), other.topology)
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., "Mesh"], tuple[dict[str, int], Topology | None]]:
        return _made, (self.sizes_by_name, self.topology if self.states_topology else None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh is a value; {name} cannot be set")

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self)})"

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in self)


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _size_fault(name: str, size: object) -> str:
    near = nearest(name, ["topology"])
    return f"{name}={size!r}: a size is a whole number >= 1{near if near.endswith('?') else ''}"


def _made(sizes: dict[str, int], topology: Topology | None) -> Mesh:
    return Mesh(topology=topology, **sizes)
