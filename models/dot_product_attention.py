"""``jax.nn.dot_product_attention``, of which the planner takes the form that makes the step fastest within the memory.

    plain          as jax writes it, with all attention weights
    recomputed     its weights are computed again in the backward pass (Korthikanti et al. 2022)
    blockwise      one block of keys after another, with a running softmax (``models.blockwise_attention``)
    ring           blocks of keys and values hop between the devices that split the sequence (``models.ring_attention``)
    permuted_ring  so, in zig-zag order, which balances causal work: positions are permuted on the way in and back

All take a batch in the usual order. In the first three, the planner decides how positions and heads are split: keys and
values are gathered, or positions exchanged for heads (Ulysses).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.errors import ArgumentError, is_a
from meshdsl.models.ring_attention import Terms, ring_attention

FORMS = ("plain", "recomputed", "blockwise", "ring", "permuted_ring")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Any = None,
    blocks: int = 1,
    forms: Mapping[str, Callable[..., Any]] | None = None,
    **others: Any,
) -> Any:
    """Returns the result of ``jax.nn.dot_product_attention``, in the form that the planner takes.

    Without a planner, jax's own function is called; so it is if an ``implementation`` is named, ``scale`` is an array,
    or an argument is given that is not listed here, such as ``return_residual``.

    Args:
      query: ``[batch seq heads head]`` or ``[seq heads head]``.
      key: ``[batch keys heads head]``; its heads divide those of ``query``.
      value: like ``key``.
      bias: added to the scores ``[batch heads seq keys]``; sizes may be 1.
      mask: true for the scores that are kept; sizes may be 1.
      scale: of the scores; by default ``head ** -0.5``.
      is_causal: whether a position attends only to itself and earlier ones.
      query_seq_lengths: int32 ``[batch]``; results of later queries are zeros.
      key_value_seq_lengths: int32 ``[batch]``; later keys are not seen.
      local_window_size: keys are seen at most so far before and after a query.
      implementation: as jax's.
      blocks: devices that the sequence is split over; by default, rings are not compared. Neither are they with a
        ``bias`` or ``mask``, nor, if causal, with ``key_value_seq_lengths`` or keys of another length than the queries.
      forms: more functions of query, key and value with this result, by name, such as kernels with a rule; left out
        of calls with a ``bias``, ``mask`` or lengths.

    The choice is called ``attention``, and after the kinds of arguments, such as ``attention.causal.window``, whether
    there are rings (``blocks``), and the names of ``forms``: calls of one kind take the same form.

    Raises:
      ArgumentError: ``query``, ``key`` or ``value`` has other dims, ``blocks`` is no positive integer, or one of
        ``forms`` is no function, or has the name of a form above.

    Example:
      >>> query, key = jnp.ones((2, 64, 4, 8)), jnp.ones((2, 64, 2, 8))
      >>> dot_product_attention(query, key, key, is_causal=True).shape
      (2, 64, 4, 8)
    """
    _check({"query": query, "key": key, "value": value}, blocks, forms or {})
    jaxs = partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        implementation=implementation,
        **others,
    )

    def plain(query: Any, key: Any, value: Any, bias: Any, mask: Any, rows: Any, keys: Any) -> Any:
        return jaxs(query, key, value, bias, mask, query_seq_lengths=rows, key_value_seq_lengths=keys)

    arrays = query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths
    if implementation is not None or others or isinstance(scale, jax.Array):
        return plain(*arrays)
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    features = {
        "causal": is_causal,
        "cross": query.shape[-3] != key.shape[-3],
        "bias": bias is not None,
        "mask": mask is not None,
        "lengths": not (query_seq_lengths is None and key_value_seq_lengths is None),
        "window": window is not None,
    }
    ring = partial(_in_ring, is_causal, window, scale)
    variants: dict[str, Callable[..., Any]] = {
        "plain": plain,
        "recomputed": jax.checkpoint(plain),
        "blockwise": partial(ring, 1, "usual"),
    }
    # Causal rings skip visits, but a query that sees no key has the mean of all values: each is to see itself.
    sees_itself = not features["cross"] and key_value_seq_lengths is None and (window is None or min(window) >= 0)
    if blocks > 1 and bias is None and mask is None and (sees_itself or not is_causal):
        features["blocks"] = True
        variants["ring"] = partial(ring, blocks, "usual")
        if is_causal:
            variants["permuted_ring"] = partial(ring, blocks, "permuted")
    if not (features["bias"] or features["mask"] or features["lengths"]):
        variants |= {name: partial(_in_form, form) for name, form in (forms or {}).items()}
        features |= dict.fromkeys(forms or {}, True)
    name = ".".join(["attention", *(feature for feature, given in features.items() if given)])
    return md.alternatives(name, variants)(*arrays)


def _check(arrays: Mapping[str, Any], blocks: Any, forms: Any) -> None:
    """Raises ArgumentError unless arguments that jax's function does not check are as stated."""
    for name, x in arrays.items():
        if isinstance(x, md.NamedArray):
            raise ArgumentError(f"{name}: is a named tensor [{' '.join(x.dims)}]; give {name}.array")
        if jnp.ndim(x) not in (3, 4):
            raise ArgumentError(f"{name}: shape {jnp.shape(x)} is neither [batch seq heads head] nor [seq heads head]")
    if not isinstance(blocks, int | np.integer) or blocks < 1:
        raise ArgumentError(f"blocks: {is_a(blocks)}, not the size of the axis that splits the sequence, 1 or more")
    if not isinstance(forms, Mapping):
        raise ArgumentError(f"forms: {is_a(forms)}, not a dict of functions by name")
    for name, form in forms.items():
        if name in FORMS:
            raise ArgumentError(f"forms: {name!r} is the name of a form of its own; give another")
        if not callable(form):
            raise ArgumentError(f"forms: {name}: {is_a(form)}, not a function of query, key and value")


def _in_ring(
    causal: bool,
    window: tuple[int, int] | None,
    scale: float | None,
    blocks: int,
    order: str,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    rows: Any,
    keys: Any,
) -> jax.Array:
    """Returns attention in a ring; arrays are those of jax's function."""
    heads = jnp.shape(key)[-2]
    if bias is not None and jnp.shape(bias)[-1] == 1:
        bias = None  # the same for all keys, so that no weight changes
    bias, mask = (None if x is None else _in_groups(x, heads) for x in (bias, mask))
    arrays = _grouped(query, heads), _batched(key), _batched(value)
    made = ring_attention(
        *arrays, blocks, causal, order=order, scale=scale, window=window, terms=Terms(bias, mask, keys)
    )
    if rows is not None:
        made = made * (jnp.arange(made.shape[1]) < rows[:, None])[:, :, None, None, None].astype(made.dtype)
    return jnp.reshape(made, jnp.shape(query))


def _in_form(form: Callable[..., Any], query: Any, key: Any, value: Any, *_: Any) -> Any:
    return form(query, key, value)


def _batched(x: Any) -> jax.Array:
    """Returns an array with four dims, the first of which may be lacking."""
    return jnp.reshape(x, (1,) * (4 - jnp.ndim(x)) + jnp.shape(x))


def _grouped(query: Any, heads: int) -> jax.Array:
    """Returns queries per head of the keys, ``[batch seq heads queries head]``."""
    x = _batched(query)
    return jnp.reshape(x, (*x.shape[:2], heads, -1, x.shape[3]))


def _in_groups(x: Any, heads: int) -> jax.Array:
    """Returns a bias or mask with heads as those of ``_grouped``, ``[batch heads queries seq keys]``."""
    x = _batched(x)
    groups = (1, 1) if x.shape[1] == 1 else (heads, x.shape[1] // heads)
    return jnp.reshape(x, (x.shape[0], *groups, *x.shape[2:]))
