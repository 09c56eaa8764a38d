"""Windows over two dims, each split over a mesh axis of its own: the corners come from a third device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.trace.passes.share_halos import rolls_p
from tests.rules.data import floats
from tests.rules.listed import proved_together
from tests.sweeps import swept

PICTURES = ("NHWC", "HWIO", "NHWC")
CONV = "conv_general_dilated"


def conv(x, w, strides=(1, 1), padding="SAME", **options):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=PICTURES, **options)


def gradient(argument, shape, **options):
    """The gradient convolution alone, of a cotangent and of what the argument is multiplied by."""

    def run(y, other):
        given = (lambda w: conv(other, w, **options)) if argument else (lambda x: conv(x, other, **options))
        return jax.linear_transpose(given, jax.ShapeDtypeStruct(shape, "float32"))(y)[0]

    return run


CONVS = {
    "plain": ((12, 6), (3, 3), {}),
    "strided": ((24, 12), (3, 5), {"strides": (2, 2)}),
    "wide": ((12, 12), (3, 2), {"rhs_dilation": (2, 3)}),
    "spread": ((6, 12), (4, 3), {"lhs_dilation": (2, 1), "padding": ((2, 2), (1, 1))}),
    "shrinking": ((42, 42), (7, 7), {"padding": "VALID"}),
    "shifted": ((12, 12), (3, 3), {"padding": ((3, -1), (0, 2))}),
}
CASES = {}
for kind, (images, kernels, options) in CONVS.items():
    images, kernels = (1, *images, 2), (*kernels, 2, 1)
    result = jax.eval_shape(partial(conv, **options), np.zeros(images, "f"), np.zeros(kernels, "f")).shape
    CASES[kind] = CONV, partial(conv, **options), floats(*images), floats(*kernels)
    CASES[f"{kind}, to images"] = CONV, gradient(0, images, **options), floats(*result), floats(*kernels)
    CASES[f"{kind}, to kernels"] = CONV, gradient(1, kernels, **options), floats(*result), floats(*images)

DISTINCT = (np.arange(144.0, dtype="float32").reshape(12, 12) * 5 % 144) - 70


def pool(x, start=-np.inf, kind=lax.max, window=(3, 4), strides=(2, 1), padding="SAME"):
    return lax.reduce_window(x, start, kind, window, strides, padding)


CASES |= {
    "one summed": (CONV, partial(conv, padding=((1, 1), (1, 1))), floats(1, 12, 12, 2), floats(12, 3, 2, 1)),
    "maxima": ("reduce_window_max", pool, floats(12, 12)),
    "sums": ("reduce_window_sum", partial(pool, start=0.0, kind=lax.add), floats(12, 12)),
    "products": ("reduce_window", partial(pool, start=1.0, kind=lax.mul), floats(12, 12)),
    "forward": ("select_and_gather_add", lambda t, x: jax.jvp(pool, (x,), (t,))[1], floats(12, 12), DISTINCT),
    "backward": ("select_and_scatter_add", lambda y, x: jax.vjp(pool, x)[1](y)[0], floats(6, 12), DISTINCT),
    "rolled": ("rolls", lambda x: rolls_p.bind(x, moves=((1, 1), (-1, 2), (0, -1))), floats(12, 12)),
    "cut": ("slice", lambda x: x[2:-4, 3:-3], floats(24, 18)),
    "padded": ("pad", lambda x: jnp.pad(x, ((2, 4), (4, 2)), constant_values=7.0), floats(12, 12)),
}


@swept("name", CASES, every=3)
def test_corners_arrive(name):
    assert proved_together(*CASES[name]) == (2, [])
