"""The public names of ``md.nd``, by purpose. ``__init__.py`` reads this file, so that there is one list of them."""

# ---- Dims, and arrays with them
from meshdsl.nd.named_dims import Dims as Dims
from meshdsl.nd.named_dims import DimsLike as DimsLike
from meshdsl.nd.named_dims import dims as dims
from meshdsl.nd.named_array import NamedArray as NamedArray
from meshdsl.nd.named_array import Tensor as Tensor
from meshdsl.nd.named_array import named as named

# ---- Elementwise, reductions, contractions
from meshdsl.nd.math import apply as apply
from meshdsl.nd.math import where as where
from meshdsl.nd.math import exp as exp
from meshdsl.nd.math import log as log
from meshdsl.nd.math import log1p as log1p
from meshdsl.nd.math import expm1 as expm1
from meshdsl.nd.math import sqrt as sqrt
from meshdsl.nd.math import rsqrt as rsqrt
from meshdsl.nd.math import square as square
from meshdsl.nd.math import sign as sign
from meshdsl.nd.math import sin as sin
from meshdsl.nd.math import cos as cos
from meshdsl.nd.math import tanh as tanh
from meshdsl.nd.math import sigmoid as sigmoid
from meshdsl.nd.math import relu as relu
from meshdsl.nd.math import gelu as gelu
from meshdsl.nd.math import silu as silu
from meshdsl.nd.math import softplus as softplus
from meshdsl.nd.math import maximum as maximum
from meshdsl.nd.math import minimum as minimum
from meshdsl.nd.math import clip as clip
from meshdsl.nd.math import isfinite as isfinite
from meshdsl.nd.math import logical_not as logical_not
from meshdsl.nd.math import floor as floor
from meshdsl.nd.math import round as round
from meshdsl.nd.math import stop_gradient as stop_gradient
from meshdsl.nd.math import sum as sum
from meshdsl.nd.math import mean as mean
from meshdsl.nd.math import prod as prod
from meshdsl.nd.math import max as max
from meshdsl.nd.math import min as min
from meshdsl.nd.math import any as any
from meshdsl.nd.math import all as all
from meshdsl.nd.math import var as var
from meshdsl.nd.math import std as std
from meshdsl.nd.math import logsumexp as logsumexp
from meshdsl.nd.math import norm as norm
from meshdsl.nd.math import argmax as argmax
from meshdsl.nd.math import argmin as argmin
from meshdsl.nd.math import softmax as softmax
from meshdsl.nd.math import log_softmax as log_softmax
from meshdsl.nd.math import rms_norm as rms_norm
from meshdsl.nd.math import layer_norm as layer_norm
from meshdsl.nd.math import dot as dot
from meshdsl.nd.math import cumsum as cumsum
from meshdsl.nd.math import cumprod as cumprod
from meshdsl.nd.math import cummax as cummax
from meshdsl.nd.math import cummin as cummin
from meshdsl.nd.math import cumlogsumexp as cumlogsumexp
from meshdsl.nd.math import cross_entropy as cross_entropy

# ---- Shape and indexing
from meshdsl.nd.shape import rename as rename
from meshdsl.nd.shape import order as order
from meshdsl.nd.shape import split as split
from meshdsl.nd.shape import merge as merge
from meshdsl.nd.shape import broadcast as broadcast
from meshdsl.nd.shape import concat as concat
from meshdsl.nd.shape import pack as pack
from meshdsl.nd.shape import padded as padded
from meshdsl.nd.shape import roll as roll
from meshdsl.nd.shape import flip as flip
from meshdsl.nd.shape import index as index
from meshdsl.nd.shape import take as take
from meshdsl.nd.shape import update as update
from meshdsl.nd.shape import top_k as top_k
from meshdsl.nd.shape import sort as sort
from meshdsl.nd.shape import argsort as argsort

# ---- Creation and random numbers
from meshdsl.nd.create import zeros as zeros
from meshdsl.nd.create import ones as ones
from meshdsl.nd.create import full as full
from meshdsl.nd.create import arange as arange
from meshdsl.nd.create import one_hot as one_hot
from meshdsl.nd.create import causal as causal
from meshdsl.nd.create import normal as normal
from meshdsl.nd.create import truncated_normal as truncated_normal
from meshdsl.nd.create import uniform as uniform
from meshdsl.nd.create import fan_in as fan_in
from meshdsl.nd.create import bernoulli as bernoulli
from meshdsl.nd.create import categorical as categorical
from meshdsl.nd.create import dropout as dropout

# ---- Convolution and pooling
from meshdsl.nd.window import conv as conv
from meshdsl.nd.window import max_pool as max_pool
from meshdsl.nd.window import sum_pool as sum_pool

# ---- Loops, rematerialization, stacked layers
from meshdsl.nd.control_flow import scan as scan
from meshdsl.nd.control_flow import vmap as vmap
from meshdsl.nd.control_flow import keep as keep
from meshdsl.nd.control_flow import remat as remat
from meshdsl.nd.layer_stack import stack as stack
