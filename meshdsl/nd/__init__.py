"""Tensors with named dims: ordinary arrays whose dims have names, and functions that address dims by name.

    x = md.nd.named(array, "batch seq embed")
    y = md.nd.dot(x, w, over="embed")            # contracts "embed" wherever it stands; shared dims are batch dims
    p = md.nd.softmax(y, over="seq")

Operands meet by name (broadcasting by name, as in xarray and penzai's named axes), never by position, and an axis rule
such as ``"batch:data embed:model"`` shards every tensor that has the dim. Names exist while tracing only: the jaxpr is
the one that the same step written by hand on arrays gives. The idea is that of Mesh TensorFlow (Shazeer et al. 2018),
named tensors (Chiang, Rush and Barak 2021) and Haliax.

    named_dims     names and sizes, as text and as a value
    diagnostics    errors that call the operands by their names at the user's line
    named_array    the tensor; alignment of operands by name; names given to arrays and found in operands
    constrain      ``md.constrain``: a layout for a value inside a step
    math           elementwise functions, reductions, running reductions, contractions, losses
    shape          rename, split, merge, concatenate, index, sort
    create         constants, random numbers, dropout
    window         convolution and pooling
    control_flow   scan and vmap over a dim, rematerialization
    layer_stack    flax modules repeated over a dim of layers

``__init__.pyi`` lists the public names; they are imported on first use.
"""

from meshdsl.util.stubs import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
