"""What random programs have found, each as small as it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from tests.fuzz.generator import SLOW_DEVICES, SLOW_LINKS


def test_a_dynamic_slice_that_is_split_starts_in_bounds():
    """XLA (jax 0.10) reads a slice of a dynamic slice from where the latter would start without bounds."""

    def step(x, i):
        return lax.dynamic_slice_in_dim(x, i, 8)

    sharded = md.parallelize(step, md.Mesh(x=4), {"x": "x=B"}, outputs={"**": "x=S(0)"})
    assert sharded.check(jnp.arange(16.0), jnp.int32(12)).ok


@pytest.mark.parametrize("at", [0, 11])
def test_a_scatter_to_one_position_leaves_other_blocks_alone(at):
    """The same in XLA's scatter to one position, where the operand is a block of a whole array."""

    def step(x, i, y):
        return x.at[i].set(y), x.at[i].multiply(y)

    sharded = md.parallelize(step, md.Mesh(x=3), {"x": "x=B"}, outputs={"**": "x=S(0)"})
    assert sharded.check(jnp.arange(48.0).reshape(12, 4), jnp.int32(at), jnp.arange(4.0) - 7).ok


def test_a_slice_of_one_element_of_a_product_of_a_slice_is_multiplied():
    """XLA (jax 0.10 and 0.12, CPU) loses ``3 *`` of whole numbers between two slices, also without a mesh."""

    def step(x):
        made = md.constrain(md.constrain(x, "x=S(0) y=B") * 3, "x=S(0) y=B")
        return md.constrain(made, "x=S(0) y=S(0)") + 1

    sharded = md.parallelize(step, md.Mesh(x=2, y=3), {"x": "x=B y=B"}, outputs={"**": "x=S(0) y=S(0)"})
    assert sharded.check(jnp.array([5, 1, 4, 2, 3, 9])).ok


def test_axes_may_swap_past_one_that_stays():
    """The pairs of the compiled permutation differ in two axes only; the plan names all three that split the dim."""
    mesh = md.Mesh(x=2, y=2, z=2)
    sharded = md.parallelize(
        lambda a: a * 2, mesh, {"a": "x=S(0) y=S(0) z=S(0)"}, outputs={"**": "y=S(0) x=S(0) z=S(0)"}
    )
    (line,) = sharded.verify(jnp.arange(16.0)).lines
    assert (line.kind, line.axes) == ("collective-permute", "x,y,z")


def test_what_has_no_elements_is_not_sent():
    """Derivatives of running reductions cut arrays into parts, some of them empty."""

    def step(x):
        y = md.constrain(md.constrain(x[:0], "x=S(0)"), "x=B")
        return jnp.concatenate([x, y])

    assert md.parallelize(step, md.Mesh(x=4), {"x": "x=S(0)"}).check(jnp.arange(8.0)).ok


def test_collectives_stay_in_a_loop_that_overwrites_its_smallest_carry():
    """What ties them to the trip has to be read in the body, or the compiler drops the tie."""

    def step(x, w, total, last):
        def trip(carry, _):
            product = x @ w  # larger than both, so it is not made in front of the loop
            return (carry[0] + jnp.tanh(product), product[0, 0]), None

        return lax.scan(trip, (total, last), length=5)[0]

    sharded = md.parallelize(step, md.Mesh(x=4, topology=SLOW_DEVICES), {"x": "x=S(1)", "w": "x=S(0)"})
    args = jnp.ones((16, 4)), jnp.ones((4, 16)), jnp.ones((16, 16)), jnp.float32(0)
    assert any(c.trips == 5 for c in sharded.plan(*args).collectives)
    assert sharded.verify(*args).equal


def test_a_roll_by_nothing_sends_nothing():
    sharded = md.parallelize(lambda x: jnp.roll(x, 8, axis=0) * 2, md.Mesh(x=4), {"x": "x=S(0)"})
    assert not sharded.plan(jnp.ones((8, 8))).collectives


def test_a_float32_result_may_be_as_rough_as_the_bfloat16_it_comes_from():
    def step(x):
        half = x.astype(jnp.bfloat16)
        return md.constrain(half.T @ half, "x=P").astype(jnp.float32)

    x = jnp.sin(jnp.arange(64 * 32.0)).reshape(64, 32)
    (leaf,) = md.parallelize(step, md.Mesh(x=8), {"x": "x=S(0)"}).check(x).leaves
    assert 1e-3 < leaf.error < leaf.tolerance < 0.1


def test_padding_around_nothing_sends_nothing():
    """The gradient of a roll by nothing pads an empty slice."""

    def step(x):
        return jax.grad(lambda x: jnp.sum(jnp.square(jnp.roll(x, 2, axis=0))))(x)

    sharded = md.parallelize(step, md.Mesh(x=2, topology=SLOW_DEVICES), {"x": "x=S(0)"})
    assert sharded.verify(jnp.ones((2, 8))).equal


def test_transforms_of_thin_blocks_compile():
    """A dim of one element may lie anywhere, and the compiler moves it to where its transforms fail."""

    def step(x):
        return jax.grad(lambda x: jnp.sum(jnp.square(jnp.real(jnp.fft.fft(x, axis=0)))))(x)

    sharded = md.parallelize(step, md.Mesh(x=2), {"x": "x=S(1)"}, outputs={"**": "x=B"})
    assert sharded.check(jnp.arange(16.0).reshape(4, 2, 2)).ok


def test_transforms_that_are_read_in_another_order_compile():
    """The order in which the result is read was handed on to the operand."""

    def step(x):
        found = md.constrain(jnp.real(jnp.fft.fft(md.constrain(x, "x=B"), axis=2)), "x=S(2)")
        return lax.cummax(md.constrain(found, "x=B"), axis=0, reverse=True)

    sharded = md.parallelize(step, md.Mesh(x=4), {"x": "x=S(0)"}, outputs={"**": "x=B"})
    assert sharded.check(jnp.arange(160.0).reshape(4, 10, 4)).ok


def test_a_sort_moves_only_what_is_read():
    """An argsort sorts two rows of positions, and the compiler drops the one that nobody reads."""
    sharded = md.parallelize(lambda x: (jnp.argsort(x), x * 2), md.Mesh(x=8, topology=SLOW_DEVICES), {"x": "x=S(0)"})
    assert sharded.verify(jnp.ones(16)).equal


def test_a_constant_that_is_planned_to_be_sent_is_sent():
    """Where links are faster than memory, a constant may be made in blocks; the compiler knows what they make up."""

    def step(x):
        return jnp.cumsum(jnp.ones((16, 16)), axis=1), x

    sharded = md.parallelize(step, md.Mesh(x=8, topology=SLOW_DEVICES), outputs={"**": "x=B"})
    x = jnp.ones((16, 8))
    assert sharded.plan(x).collectives
    assert sharded.verify(x).equal


def test_constants_made_on_the_spot_are_not_sent():
    """Positions, one copy for each of their readers: the compiler would make and send them once."""

    def step(x, y):
        return jnp.sum(jnp.square(x.at[::2].set(y)))

    sharded = md.parallelize(jax.grad(step), md.Mesh(x=2, topology=SLOW_DEVICES))
    assert {c.kind for c in sharded.plan(jnp.ones((8, 4)), jnp.ones((4, 4))).collectives} <= {"all-reduce"}
    assert sharded.verify(jnp.ones((8, 4)), jnp.ones((4, 4))).equal


def test_a_choice_between_equal_cases_sends_no_condition():
    """The cases may be equal in two spellings."""

    def step(x, asked):
        return jnp.where(asked, jnp.sin(x), lax.sin(x)) * 2

    layouts = {"x": "x=B", "asked": "x=S(0)"}
    sharded = md.parallelize(step, md.Mesh(x=4, topology=SLOW_LINKS), layouts, outputs={"**": "x=B"})
    assert sharded.verify(jnp.ones((8, 8)), jnp.ones((8, 8), bool)).equal


def test_a_window_is_written_over_several_blocks_in_two_dims():
    def step(x, u, i, j):
        return lax.dynamic_update_slice(x, u, (i, j))

    sharded = md.parallelize(step, md.Mesh(x=2, y=2), {"x": "x=S(0) y=S(1)"})
    assert sharded.check(jnp.zeros((8, 8)), jnp.ones((6, 5)), jnp.int32(1), jnp.int32(3)).ok
    assert not sharded.plan(jnp.zeros((8, 8)), jnp.ones((6, 5)), jnp.int32(1), jnp.int32(3)).collectives


def test_what_is_planned_to_be_gathered_again_is_gathered_again():
    """As remat has it under a memory limit, for either pass; the compiler would gather once, and keep the whole."""

    def step(w, x):
        again = md.constrain(lax.optimization_barrier(w), "x=S(0)")
        return x @ md.constrain(w, "x=B"), jnp.tanh(x) @ md.constrain(again, "x=B")

    mesh = md.Mesh(x=4, topology=SLOW_DEVICES)  # without latencies that would send both as one
    sharded = md.parallelize(step, mesh, {"w": "x=S(0)", "x": "x=S(0)"})
    args = jnp.ones((32, 64)), jnp.ones((64, 32))
    assert [c.kind for c in sharded.plan(*args).collectives] == ["all-gather"] * 2
    assert sharded.verify(*args).equal
    assert sharded.check(*args).ok


def test_a_running_maximum_does_not_send_whole_blocks():
    """Blocks of one element that two readers gather are sent once, and were planned to be sent twice."""

    def step(x, i, y):
        return lax.cummax(x, axis=0, reverse=True), x.at[i].min(y)

    sharded = md.parallelize(step, md.Mesh(x=8, topology=SLOW_DEVICES), {"x": "x=S(0)"}, outputs={"1": "x=B"})
    args = jnp.ones(8), jnp.zeros((8, 4), jnp.int32), jnp.ones((8, 4))
    assert sharded.verify(*args).equal
    assert sharded.check(*args).ok


def test_what_is_planned_to_be_exchanged_again_is_exchanged_again():
    """As remat has it: blocks in mirrored order, once for either pass."""

    def step(x):
        again = lax.optimization_barrier(x)
        return jnp.flip(x, 0) * 2, jnp.tanh(jnp.flip(again, 0))

    sharded = md.parallelize(step, md.Mesh(x=4, topology=SLOW_DEVICES), {"x": "x=S(0)"})
    x = jnp.arange(64.0).reshape(16, 4)
    assert [c.kind for c in sharded.plan(x).collectives] == ["collective-permute"] * 2
    assert sharded.verify(x).equal
    assert sharded.check(x).ok


def test_copies_that_a_later_reader_shares_are_found():
    """One block for the condition's branch and the product, while the reshape reads the whole."""

    def step(x, w, asked):
        found = lax.cond(asked, lambda t: jnp.sum(jnp.tanh(t) * t), lambda t: 0.0, x)
        return found, x @ w, x.reshape(68)

    args = jnp.ones((17, 4)), jnp.ones((4, 4)), jnp.bool_(True)
    sharded = md.parallelize(step, md.Mesh(x=2, topology=SLOW_DEVICES))
    assert sharded.plan(*args).gap < 1e-6


def test_a_loop_that_is_the_same_in_every_trip_stays_in_its_loop():
    """The inner loop begins from what the outer one never changes; the compiler would run it once, before."""

    def step(x, w):
        def outer(c, _):
            return c + lax.scan(inner, w, length=6)[0], None

        def inner(p, _):
            p = md.constrain(p, "x=S(0)")
            return 0.5 * p + jnp.sum(p) * 0.125, None

        return lax.scan(outer, x, length=16)[0]

    sharded = md.parallelize(step, md.Mesh(x=4), {"w": "x=S(0)", "x": "x=S(0)"}, outputs={"**": "x=S(0)"})
    args = jnp.ones((64, 64)), jnp.ones((64, 64))
    assert {c.trips for c in sharded.plan(*args).collectives} == {96}
    assert sharded.verify(*args).equal


def test_the_weights_of_the_gradient_of_a_real_fft_are_not_sent():
    """They are constants, and two updates of them; a compiler computes them in front of the loop."""

    def step(x):
        def inner(p, _):
            return 0.5 * p + 0.25 * jnp.mean(jnp.abs(jnp.fft.rfft(p, axis=1) + 1j)), p

        def loss(x):
            last, rows = lax.scan(inner, x, x)
            return jnp.mean(rows**2) + jnp.mean(jnp.real(jnp.fft.fft(last, axis=0)) ** 2)

        return jax.grad(loss)(x)

    sharded = md.parallelize(step, md.Mesh(x=2, topology=SLOW_DEVICES), {"x": "x=S(0)"})
    assert sharded.verify(jnp.arange(36.0).reshape(6, 6) / 36).equal


def test_a_loop_that_carries_what_it_does_not_read_is_run_once():
    """Compilers run the inner loop once; so it is planned once."""

    def step(x, i):
        def inner(y, _):
            return 0.5 * y + jnp.sum(y[i]) * 0.125, y[0]

        def outer(_, row):
            y, rows = lax.scan(inner, x, row)
            return jnp.tanh(y), rows

        return lax.scan(outer, x, x)

    sharded = md.parallelize(step, md.Mesh(x=8, topology=SLOW_DEVICES), {"x": "x=S(0)", "i": "x=S(0)"})
    args = jnp.arange(64.0).reshape(8, 8) / 64, jnp.arange(8) % 3
    assert {c.trips for c in sharded.plan(*args).collectives if c.kind == "all-reduce"} <= {1, 8}
    assert sharded.verify(*args) and sharded.check(*args).ok


def test_an_update_of_everything_leaves_nothing_to_be_sent():
    """Seed 170017: it starts where the operand does, whatever its start says, so nobody reads the operand."""

    def step(x, i):
        return lax.dynamic_update_slice_in_dim(md.constrain(x, "x=P"), x, i, 0)

    sharded = md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)"}, outputs={"*": "x=S(0)"})
    assert not sharded.plan(jnp.arange(8.0), jnp.int32(3)).collectives
    assert sharded.check(jnp.arange(8.0), jnp.int32(3)).ok and sharded.verify(jnp.arange(8.0), jnp.int32(3)).equal


@pytest.mark.parametrize("moved", [lambda x: jnp.roll(x, 8), lambda x: jnp.pad(x[:8], (8, 0))], ids=["roll", "pad"])
def test_two_blocks_change_places_once(moved):
    """Reversed, or moved on by one block: of two blocks that is the same, and the compiler drops the second."""

    def step(x):
        return lax.rev(x, (0,)), moved(x)

    mesh = md.Mesh(x=2, topology=SLOW_DEVICES)
    sharded = md.parallelize(step, mesh, {"x": "x=S(0)"}, outputs={"**": "x=S(0)"})
    x = jnp.arange(16.0)
    assert sharded.check(x).ok and sharded.verify(x).equal and len(sharded.plan(x).collectives) == 1


def test_a_window_takes_a_block_and_a_part_of_another():
    """What is sent of each is counted by itself."""

    def step(x):
        return lax.reduce_window(x, 0.0, lax.add, (6,), (1,), ((5, 0),))

    sharded = md.parallelize(step, md.Mesh(x=5, topology=SLOW_DEVICES), {"x": "x=S(0)"}, outputs={"**": "x=S(0)"})
    x = jnp.arange(20.0)
    assert sharded.check(x).ok and sharded.verify(x).equal
    assert sorted(c.bytes for c in sharded.plan(x).collectives) == [4, 16]


def test_results_without_elements_can_be_read():
    """The compiler makes whole ones, although they are to be split (jax 0.10, also without a plan)."""
    sharded = md.parallelize(lambda x: x[:, :0], md.Mesh(x=2, y=2), {"x": "x=S(0) y=B"}, outputs={"**": "x=S(0)"})
    x = jnp.arange(16.0).reshape(4, 4)
    assert sharded.check(x).ok and np.asarray(sharded(x)).shape == (4, 0)


def test_a_slice_of_a_slice_is_reduced_once():
    """An ``associative_scan`` cuts the same in two ways, which the compiler finds."""

    def step(x):
        return lax.associative_scan(lambda s, t: 0.5 * s * jnp.tanh(t), md.constrain(x, "z=P"), axis=1)

    sharded = md.parallelize(step, md.Mesh(x=2, z=3, topology=SLOW_DEVICES), {"x": "x=S(0) z=S(1)"})
    x = jnp.arange(96.0).reshape(16, 6) / 96
    assert sharded.check(x).ok and sharded.verify(x).equal


def test_products_in_either_order_are_one():
    """The gradient of a slice times itself sends its ends once, as the compiler does."""

    def step(x):
        return jax.grad(lambda x: jnp.square(jnp.sum(x[:, 2:14] * x[:, 2:14], axis=1)).mean())(x)

    sharded = md.parallelize(step, md.Mesh(x=4, y=2, topology=SLOW_DEVICES), {"x": "x=S(1) y=S(0)"})
    assert sharded.verify(jnp.arange(1600.0).reshape(10, 16, 10)).equal


def test_what_every_iteration_exchanges_is_exchanged_in_each():
    """The halo of a loop invariant, which a convolution takes whose kernel changes between iterations."""

    def step(x, w):
        def body(w, _):
            y = lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
            return w + y.mean(), None

        return lax.scan(body, w, None, 3)[0]

    sharded = md.parallelize(step, md.Mesh(x=2, topology=SLOW_DEVICES), {"x": "x=S(1)"})
    x, w = jnp.arange(16.0).reshape(2, 8, 1), jnp.ones((2, 1, 3))
    assert sharded.plan(x, w).collectives[0].trips == 3 and sharded.verify(x, w).equal and sharded.check(x, w).ok


def test_an_edge_padded_behind_an_update_with_strides():
    """A slice without elements of what is joined has no pieces."""

    def step(x):
        def loss(x):
            y = jnp.pad(x.at[1::2].add(x[1::2]), ((0, 1),), mode="edge")
            return jnp.mean(y**2), y

        (total, y), gradient = jax.value_and_grad(loss, has_aux=True)(x)
        return x - 0.1 * gradient, total, y

    sharded = md.parallelize(step, md.Mesh(x=8, topology=SLOW_DEVICES))
    x = jnp.arange(8.0) / 4
    assert sharded.check(x).ok and sharded.verify(x).equal


def test_uneven_pins_of_inputs_that_nothing_reads_send_nothing():
    def step(x, y, z):
        return jnp.exp(-(x**2)) * x, z

    mesh, pins = md.Mesh(x=3, y=2, topology=SLOW_DEVICES), {"x": "y=S(0) x=B", "y": "y=S(0) x=S(0)", "z": "x=S(0)"}
    sharded = md.parallelize(step, mesh, pins, uneven="pad")
    args = jnp.arange(12.0), jnp.ones((3, 3)), jnp.ones(5)
    assert sharded.check(*args).ok and sharded.verify(*args).equal


def test_equal_ends_of_a_block_are_sent_both_ways():
    """All rows of a mean's gradient are equal; over two devices both ends of its halo go to the same one."""

    def step(x, w):
        def loss(x, w):
            pooled = lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")
            return jnp.mean((w + jnp.mean(pooled)) ** 2)

        return jax.grad(loss)(x, w)

    sharded = md.parallelize(step, md.Mesh(x=2, topology=SLOW_DEVICES), {"x": "x=S(0)"}, outputs={"*": "x=S(0)"})
    args = jnp.arange(192.0).reshape(16, 12), jnp.ones(16)
    assert sharded.check(*args).ok and sharded.verify(*args).equal
