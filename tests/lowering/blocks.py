"""Blocks of a global array by layout, in plain numpy: what the lowered programs are compared with."""

from itertools import product

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Partial, Split


def split_numpy(array, layout, mesh, rng):
    """Every device's block: an array of shape mesh.sizes + local shape."""
    parts = _partials(array, layout, mesh, rng)
    blocks = [parts[_on(layout, mesh, at, Partial)][_window(array.shape, layout, mesh, at)] for at in _devices(mesh)]
    return np.stack(blocks).reshape(*mesh.sizes, *blocks[0].shape)


def assemble(blocks, layout, shape, mesh):
    """The global array that the devices' blocks stand for; replicas have to agree."""
    parts = {}
    for at in _devices(mesh):
        part = parts.setdefault(_on(layout, mesh, at, Partial), {})
        key = _on(layout, mesh, at, Split)
        np.testing.assert_array_equal(part.setdefault(key, (at, blocks[at]))[1], blocks[at])
    return _reduce(layout, mesh, [_whole(part, layout, shape, mesh, blocks.dtype) for part in parts.values()])


def _whole(part, layout, shape, mesh, dtype):
    whole = np.zeros(shape, dtype)
    for at, block in part.values():
        whole[_window(shape, layout, mesh, at)] = block
    return whole


def _partials(array, layout, mesh, rng):
    keys = sorted({_on(layout, mesh, at, Partial) for at in _devices(mesh)})
    reductions = {layout.on(axis).reduction for axis in layout.partial()}
    if len(keys) == 1:
        return {keys[0]: array}
    (reduction,) = reductions
    if reduction == "sum":
        parts = [rng.integers(-9, 9, array.shape).astype(array.dtype) for _ in keys[1:]]
        return dict(zip(keys, [*parts, array - sum(parts)], strict=True))
    owner = rng.integers(0, len(keys), array.shape)
    worse = np.minimum if reduction == "max" else np.maximum
    others = [worse(array, rng.integers(-9, 9, array.shape).astype(array.dtype)) for _ in keys]
    return {key: np.where(owner == i, array, others[i]) for i, key in enumerate(keys)}


def _reduce(layout, mesh, parts):
    if len(parts) == 1:
        return parts[0]
    (reduction,) = {layout.on(axis).reduction for axis in layout.partial()}
    return {"sum": np.sum, "max": np.max, "min": np.min}[reduction](np.stack(parts), axis=0).astype(parts[0].dtype)


def _window(shape, layout, mesh, at):
    """The slices of the global array that the device at mesh coordinates ``at`` holds."""
    window = []
    for dim, n in enumerate(shape):
        index, count = 0, 1
        for axis in layout.splitting(dim):
            size = mesh.axis(axis)
            index, count = index * size + at[mesh.names.index(axis)], count * size
        window.append(slice(index * (n // count), (index + 1) * (n // count)))
    return tuple(window)


def _on(layout, mesh, at, kind):
    return tuple(i for name, i in zip(mesh.names, at, strict=True) if isinstance(layout.on(name), kind))


def _devices(mesh):
    return list(product(*(range(size) for size in mesh.sizes)))


def full(text, mesh):
    """The layout written as ``text``, with ``B`` on every axis of ``mesh`` it does not name."""
    layout = Layout.parse(text)
    missing = {axis: layout.on(axis) for axis in mesh.names if axis not in layout.axes}
    return Layout(**dict(layout.placements), **missing)


def replicated(mesh: Mesh) -> Layout:
    """``B`` on every axis."""
    return full("", mesh)
