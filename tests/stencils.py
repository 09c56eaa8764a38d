"""Programs of neighbours on split dims, as people write them, with the least bytes that they need by hand.

A grid ``u`` of n rows is split over ``x``: a device needs the rows of its neighbours that its own rows are computed
from, on each side the widest. Sums over the grid cost a few bytes more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PROGRAMS: dict[str, "Stencil"] = {}


ALL = 1.75  # rows that 8 devices send to have one row of all of them, or its sum: 2 * 7 / 8


@dataclass(frozen=True)
class Stencil:
    """A program of one grid, how many rows a device sends to its neighbours, and, with those, for its gradient."""

    function: Callable[..., Any]
    rows: float
    gradient: float | None


def stencil(rows: float, gradient: float | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a program into ``PROGRAMS``."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = Stencil(function, rows, gradient)
        return function

    return enter


def summed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of the squared results."""
    return jax.grad(lambda u: sum(jnp.sum(jnp.square(y)) for y in jax.tree.leaves(function(u))))


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The results, computed once, and the gradient of the sum of their squares."""

    def both(u: Any) -> Any:
        results, back = jax.vjp(function, u)
        return results, back(jax.tree.map(lambda y: 2 * y, results))

    return both


# ---- Differences: reduced at once ------------------------------------------------------------------------------------


@stencil(1, 2)
def total_variation(u):
    return jnp.sum((u[1:] - u[:-1]) ** 2)


@stencil(1, 2)
def diff(u):
    return jnp.mean(jnp.abs(jnp.diff(u, axis=0)))


@stencil(2, 4)
def second_diff(u):
    return jnp.sum(jnp.diff(u, n=2, axis=0) ** 2)


@stencil(2, 4)
def dilated(u):
    return jnp.sum(jnp.sin(u[2:] - u[:-2]))


@stencil(4, 8)
def more_dilated(u):
    return jnp.sum(jnp.sin(u[4:] - u[:-4]))


@stencil(1, 2)
def largest_step(u):
    return jnp.max(jnp.abs(u[1:] - u[:-1]))


@stencil(1 + 1.5 * ALL, 2 + 3 * ALL)
def log_returns(u):
    r = jnp.log(u[1:] / u[:-1])
    return jnp.std(r, axis=0)


@stencil(1, 2)
def autocovariance(u):
    return jnp.trace(u[1:].T @ u[:-1])


@stencil(1 + 2 * ALL, 2 + 3 * ALL)
def smoothmax_of_steps(u):
    return jnp.sum(jax.nn.softmax(u[1:] - u[:-1], axis=0) * u[1:])


@stencil(1 + ALL)
def changes(u):
    return jnp.sum(u[1:] > u[:-1], axis=0), jnp.any(u[1:] == u[:-1]), jnp.argmax(jnp.sum(u[1:] - u[:-1], 1))


@stencil(2, 4)
def windows(u):
    return jnp.sum(jnp.max(jnp.stack([u[i : len(u) - 2 + i] for i in range(3)]), axis=0))


@stencil(2, 4)
def limited_slopes(u):
    d = u[1:] - u[:-1]
    slope = jnp.where(d[1:] * d[:-1] > 0, jnp.minimum(jnp.abs(d[1:]), jnp.abs(d[:-1])) * jnp.sign(d[1:]), 0.0)
    return jnp.sum(slope**2)


# ---- Interiors put back ----------------------------------------------------------------------------------------------


def laplacian(u):
    return u[2:] - 2 * u[1:-1] + u[:-2]


@stencil(2, 4)
def heat_set(u):
    return u.at[1:-1].set(u[1:-1] + 0.1 * laplacian(u))


@stencil(2, 4)
def heat_add(u):
    return u.at[1:-1].add(0.1 * laplacian(u))


@stencil(2, 4)
def heat_concatenate(u):
    return jnp.concatenate([u[:1], u[1:-1] + 0.1 * laplacian(u), u[-1:]])


@stencil(2, 4)
def heat_pad(u):
    return u + 0.1 * jnp.pad(laplacian(u), ((1, 1), (0, 0)))


@stencil(2, 4)
def heat_zeros(u):
    return u + jnp.zeros_like(u).at[1:-1].set(0.1 * laplacian(u))


@stencil(2, 4)
def heat_update(u):
    return lax.dynamic_update_slice(u, u[1:-1] + 0.1 * laplacian(u), (1, 0))


@stencil(4, 8)
def fourth_order(u):
    return u.at[2:-2].add(-0.01 * (u[4:] - 4 * u[3:-1] + 6 * u[2:-2] - 4 * u[1:-3] + u[:-4]))


@stencil(1, 2)
def upwind_concatenate(u):
    return jnp.concatenate([u[:1], u[1:] - 0.3 * (u[1:] - u[:-1])])


@stencil(1, 2)
def upwind_add(u):
    return u.at[1:].add(-0.3 * (u[1:] - u[:-1]))


@stencil(1, 2)
def downwind_set(u):
    return u.at[:-1].set(u[:-1] - 0.3 * (u[1:] - u[:-1]))


@stencil(2, 4)
def flux_differences(u):
    flux = 0.5 * (u[1:] ** 2 + u[:-1] ** 2) / 2 - 0.3 * (u[1:] - u[:-1])
    return u.at[1:-1].add(-0.1 * (flux[1:] - flux[:-1]))


@stencil(2, 4)
def lax_wendroff(u):
    half = 0.5 * (u[1:] + u[:-1]) - 0.1 * (u[1:] ** 2 - u[:-1] ** 2)
    return u.at[1:-1].add(-0.2 * (half[1:] ** 2 - half[:-1] ** 2))


@stencil(2 + 2 * ALL, 5 + 4 * ALL)
def gradient(u):
    return jnp.gradient(u, axis=0)


@stencil(2 + ALL, 4 + 3 * ALL)
def nonuniform_gradient(u):
    x = jnp.linspace(0, 1, len(u))[:, None] ** 2
    return jnp.concatenate([u[:1] * 0, (u[2:] - u[:-2]) / (x[2:] - x[:-2]), u[:1] * 0])


@stencil(2, 4)
def dirichlet(u):
    return heat_set(u).at[0].set(0.0).at[-1].set(1.0)


@stencil(2 * ALL, 4 * ALL)
def neumann(u):
    return u.at[0].set(u[1]).at[-1].set(u[-2])


@stencil(2 + 2 * ALL, 4 + 4 * ALL)
def heat_neumann(u):
    return neumann(heat_set(u))


@stencil(10, 20)
def time_loop(u):
    return lax.scan(lambda u, _: (heat_set(u), None), u, length=5)[0]


@stencil(4, 8)
def time_loop_with_losses(u):
    def body(u, _):
        return upwind_add(u), total_variation(u)

    return lax.scan(body, u, length=2)


@stencil(6)
def until(u):
    return lax.fori_loop(0, 3, lambda _, u: heat_concatenate(u), u)


# ---- Longer than the grid: ghost rows and faces ----------------------------------------------------------------------


def ghosts(mode):
    """The heat equation with one row of ghosts at each end."""

    def heat_ghosts(u):
        return u + 0.1 * laplacian(jnp.pad(u, ((1, 1), (0, 0)), mode=mode))

    return heat_ghosts


for name, mode, rows, gradient in (
    ("zero_ghosts", "constant", 2, 4),
    ("edge_ghosts", "edge", 2, 4 + 2 * ALL),
    ("wrapped_ghosts", "wrap", 2, 4 + 2 * ALL),
    ("reflected_ghosts", "reflect", 4, 4 + 2 * ALL),
):
    PROGRAMS[name] = Stencil(ghosts(mode), rows, gradient)


@stencil(2, 4 + 2 * ALL)
def periodic_ghosts(u):
    p = jnp.concatenate([u[-1:], u, u[:1]])
    return u + 0.1 * laplacian(p)


@stencil(2, 4 + 3 * ALL)
def ghosts_through_functions(u):
    p = jnp.sin(jnp.pad(u, ((1, 1), (0, 0)), mode="edge"))
    return u + 0.1 * laplacian(p)


@stencil(2, 4 + 3 * ALL)
def faces(u):
    p = jnp.pad(u, ((1, 1), (0, 0)), mode="edge")
    flux = 0.5 * (p[1:] + p[:-1]) - 0.2 * (p[1:] - p[:-1]) ** 2
    return u - 0.1 * (flux[1:] - flux[:-1])


@stencil(2 + ALL, 4 + 3 * ALL)
def faces_with_given_ends(u):
    flux = jnp.concatenate([u[:1] * 0, 0.5 * (u[1:] + u[:-1]), u[-1:]])
    return u - 0.1 * (flux[1:] - flux[:-1])


@stencil(4 + 2 * ALL, 10 + 4 * ALL)
def wide_ghosts(u):
    p = jnp.pad(u, ((2, 2), (0, 0)), mode="edge")
    return -p[4:] + 8 * p[3:-1] - 8 * p[1:-3] + p[:-4]


# ---- Shifts ----------------------------------------------------------------------------------------------------------


@stencil(1, 2)
def token_shift(u):
    return u + 0.5 * jnp.pad(u, ((1, 0), (0, 0)))[:-1]


@stencil(3, 6)
def causal_convolution(u):
    return sum(w * jnp.pad(u, ((k, 0), (0, 0)))[: len(u)] for k, w in enumerate((0.4, 0.3, 0.2, 0.1)))


@stencil(3, 6)
def causal_convolution_padded_once(u):
    p = jnp.pad(u, ((3, 0), (0, 0)))
    return sum(w * p[k : k + len(u)] for k, w in enumerate((0.4, 0.3, 0.2, 0.1)))


@stencil(0, 0)
def pairs(u):
    return u[::2] - u[1::2], 0.5 * (u[::2] + u[1::2])


@stencil(0, 0)
def interleaved(u):
    return jnp.stack([u[::2] * 2, u[1::2]], 1).reshape(u.shape)


@stencil(0, 0)
def interleaved_by_updates(u):
    return u.at[::2].set(u[1::2]).at[1::2].multiply(0.5)


@stencil(1, 2)
def red_black(u):
    return u.at[1:-1:2].set(0.5 * (u[0:-2:2] + u[2::2]))


@stencil(1.75)  # one row of the last device, all-reduced
def last(u):
    return jnp.tanh(u[-1])


@stencil(0.1)
def first_rows(u):
    return jnp.sum(u[0] * 2)


@stencil(0)
def marked(u):
    return u.at[0].set(0.0).at[-2:].add(1.0).at[5].multiply(2.0)


# ---- Two dims --------------------------------------------------------------------------------------------------------
# A grid split both ways: rows and columns that a device sends, corners in one of the two.


PLANES: dict[str, tuple[Callable[..., Any], tuple[float, float], tuple[float, float]]] = {}


def plane(forward: tuple[float, float], gradient: tuple[float, float]) -> Callable[[Callable[..., Any]], Any]:
    """Enters a program into ``PLANES``: rows and columns that it sends, and for its gradient."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        PLANES[function.__name__] = function, forward, gradient
        return function

    return enter


@plane((2, 2), (4, 4))
def five_points(u):
    inner = u[1:-1, 1:-1]
    return u.at[1:-1, 1:-1].add(0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * inner))


@plane((2, 2), (4, 4))
def nine_points(u):
    n, m = u.shape
    return u.at[1:-1, 1:-1].add(
        0.1 * sum((i + 2 * j) * u[i : n - 2 + i, j : m - 2 + j] for i in range(3) for j in range(3))
    )


@plane((2, 2), (4, 4))
def nine_points_padded(u):
    p, (n, m) = jnp.pad(u, 1), u.shape
    return sum(p[i : i + n, j : j + m] for i in range(3) for j in range(3) if (i, j) != (1, 1))


@plane((1, 1), (2, 2))
def anisotropic_variation(u):
    return jnp.sum(jnp.abs(u[1:] - u[:-1])) + jnp.sum(jnp.abs(u[:, 1:] - u[:, :-1]))


@plane((1, 1), (2, 2))
def isotropic_variation(u):
    return jnp.sum(jnp.sqrt((u[1:, :-1] - u[:-1, :-1]) ** 2 + (u[:-1, 1:] - u[:-1, :-1]) ** 2 + 1e-3))


@plane((2, 2), (7, 6))  # the rows and columns at the edges of the grid, reduced over all
def edges_copied(u):
    p = jnp.pad(u, 1, mode="edge")
    return u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)


@plane((2, 2), (7, 6))
def torus(u):
    p = jnp.pad(u, 1, mode="wrap")
    return u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)


@plane((2, 2), (4, 4))
def nine_points_around_a_torus(u):
    return sum(
        w[i + 1][j + 1] * jnp.roll(u, (i, j), (0, 1))
        for w in [((1, 4, 1), (4, -20, 4), (1, 4, 1))]
        for i in (-1, 0, 1)
        for j in (-1, 0, 1)
    )


@plane((2, 2), (4, 4))
def neighbours_around_a_torus(u):
    """A board of cells."""
    shifted = [jnp.roll(jnp.roll(u, i, 0), j, 1) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    return jax.nn.sigmoid(jnp.sum(jnp.stack(shifted), 0) - 3 + u)


@plane((4, 4), (8, 8))
def wide_star_around_a_torus(u):
    return sum(w * jnp.roll(u, k, d) for d in (0, 1) for k, w in ((-2, -1.0), (-1, 16.0), (1, 16.0), (2, -1.0)))


@plane((2, 2), (11, 10))  # nine arrays are shifted one by one
def nine_points_with_periodic_ghosts(u):
    p = jnp.pad(u, 1, mode="wrap")
    return sum(jnp.sin(p[i : i + len(u), j : j + u.shape[1]]) for i in range(3) for j in range(3))


@plane((6, 6), (12, 12))
def plane_in_time(u):
    return lax.scan(lambda u, _: (nine_points(u), None), u, length=3)[0]


# ---- Sequences -------------------------------------------------------------------------------------------------------


def next_tokens(params, tokens):
    """Labels are the tokens one place further on."""
    hidden = jnp.tanh(params["embed"][tokens[:, :-1]])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(hidden @ params["out"]), tokens[:, 1:, None], -1)
    return -jnp.mean(chosen)


def next_tokens_cut_late(params, tokens):
    """The same, where the last place is cut off the scores."""
    scores = jnp.tanh(params["embed"][tokens]) @ params["out"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), tokens[:, 1:, None], -1))


def repeated_tokens(params, tokens):
    """Weights by whether a token repeats the one before it."""
    scores = jnp.tanh(params["embed"][tokens]) @ params["out"]
    fresh = jnp.concatenate([jnp.ones_like(tokens[:, :1], bool), tokens[:, 1:] != tokens[:, :-1]], 1)
    return jnp.sum(jnp.where(fresh[..., None], jax.nn.log_softmax(scores), 0.0)) / jnp.sum(fresh)


SEQUENCES = (next_tokens, next_tokens_cut_late, repeated_tokens)


def grid(n: int = 2048, columns: int = 256) -> jax.Array:
    """Positive numbers, no two alike."""
    return np.random.default_rng(0).uniform(0.5, 1.5, (n, columns)).astype("f")


@stencil(2 + ALL / 2, 4 + ALL)
def frames(u):
    """Windows looked up by their positions, the first of each two rows on."""
    taken = u[np.arange(len(u) - 2)[:, None] + np.arange(3)]
    halves = jnp.take(u, 2 * jnp.arange(len(u) // 2)[:, None] + jnp.arange(2), axis=0)
    return jnp.sum(jnp.max(taken, 1) * taken[:, 0], 0), jnp.sum(halves[:, 0] * halves[:, 1])
