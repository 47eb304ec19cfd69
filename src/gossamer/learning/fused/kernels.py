"""Compiled kernels of the fused trainer: local steps of nodes, with the samples of a batch in SIMD lanes.

An activation is stored as [feature, 16 samples], so that one vector instruction serves 16 samples. The optimizer's rule is
applied to the gradient of a weight while that is in the core's cache, as the activations are. All arithmetic is on explicit
vectors, with explicit fused multiply-adds in a fixed order, and exp and tanh are computed here: neither the compiler nor the
width of the machine's registers changes a bit.

(All compiled code is in this file, since Numba's cache notices only changes of the file itself.)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, typing
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from gossamer.learning.compiled import compiled

LANES = 16
"""Samples of a vector."""
ROWS = 8 if binding.get_host_cpu_features().get("avx512f") else 4
"""Vectors of a tile, which fill the registers of a processor with or without AVX-512. Results do not depend on it."""

Array = Any  # a NumPy array in compiled code


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function that only compiled code calls, together with its callers."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    return njit(**options)(inspect.unwrap(function))  # the tests wrap functions to check their arguments


# --- vectors of samples, and tiles of them


class _Type(types.Type):  # type: ignore[misc]
    pass


_float, _int, _index = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_vector, _integers = ir.VectorType(_float, LANES), ir.VectorType(_int, LANES)
_array = ir.ArrayType(_vector, ROWS)

vector, tile = _Type("vector"), _Type("tile")
_types = {vector: _vector, tile: _array}
register_model(_Type)(lambda manager, kind: models.PrimitiveModel(manager, kind, _types[kind]))
array, index, number = object(), types.intp, types.float32


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes LLVM instructions callable from compiled code. The decorated function writes them, given a builder and the values
    of the arguments; an array is passed as the pointer to its first value."""

    def wrap(write: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            kinds = [
                kind if formal is array else formal for kind, formal in zip(given, arguments, strict=True)
            ]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                plain = [
                    context.make_array(kind)(context, builder, value).data
                    if isinstance(kind, types.Array)
                    else value
                    for kind, value in zip(signature.args, values, strict=True)
                ]
                value = write(builder, *plain)
                return context.get_dummy_value() if result is types.void else value

            return typing.signature(result, *kinds), generate

        typed.__name__ = write.__name__
        typed.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return wrap


def _same(x: float) -> Any:
    return ir.Constant(_vector, [x] * LANES)


def _splat(b: Any, x: Any) -> Any:
    lane = b.insert_element(ir.Constant(_vector, ir.Undefined), x, _int(0))
    return b.shuffle_vector(lane, ir.Constant(_vector, ir.Undefined), ir.Constant(_integers, [0] * LANES))


def _call(b: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(b, "llvm.fma.v16f32", _vector, x, y, z)


def _at(b: Any, a: Any, i: Any) -> Any:
    return b.bitcast(b.gep(a, [i]), _vector.as_pointer())


def _read(b: Any, a: Any, i: Any) -> Any:
    return b.load(_at(b, a, i), align=4)


def _first(b: Any, n: Any) -> Any:
    """The mask of the first n lanes."""
    none, zeroth = ir.Constant(_integers, ir.Undefined), ir.Constant(_integers, [0] * LANES)
    counts = b.shuffle_vector(b.insert_element(none, b.trunc(n, _int), _int(0)), none, zeroth)
    return b.icmp_signed("<", ir.Constant(_integers, list(range(LANES))), counts)


def _rows(b: Any, i: Any, stride: Any, n: Any) -> list[Any]:
    """Positions of a tile's rows; rows from n on repeat the last one."""
    last = b.mul(b.sub(n, _index(1)), stride)
    return [
        b.add(i, b.select(b.icmp_signed("<", _index(t), n), b.mul(_index(t), stride), last))
        for t in range(ROWS)
    ]


def _tile(b: Any, rows: list[Any]) -> Any:
    result = ir.Constant(_array, ir.Undefined)
    for t, row in enumerate(rows):
        result = b.insert_value(result, row, t)
    return result


def _total(b: Any, x: Any) -> Any:
    half = LANES // 2
    while half:
        kind, none = ir.VectorType(_int, half), ir.Constant(x.type, ir.Undefined)
        low = b.shuffle_vector(x, none, ir.Constant(kind, list(range(half))))
        high = b.shuffle_vector(x, none, ir.Constant(kind, list(range(half, 2 * half))))
        x, half = b.fadd(low, high), half // 2
    return b.extract_element(x, _int(0))


load = operation(vector, array, index)(lambda b, a, i: _read(b, a, i))
"""a[i : i + 16]"""


@operation(types.void, array, index, vector)
def store(b: Any, a: Any, i: Any, x: Any) -> None:
    """a[i : i + 16] = x"""
    b.store(x, _at(b, a, i), align=4)


@operation(vector, array, index, index)
def load_first(b: Any, a: Any, i: Any, n: Any) -> Any:
    """a[i : i + n], and zeros"""
    arguments = _at(b, a, i), _int(4), _first(b, n), _same(0)
    return _call(b, "llvm.masked.load.v16f32.p0", _vector, *arguments)


@operation(types.void, array, index, index, vector)
def store_first(b: Any, a: Any, i: Any, n: Any, x: Any) -> None:
    """a[i : i + n] = x[:n]"""
    _call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), x, _at(b, a, i), _int(4), _first(b, n))


splat = operation(vector, number)(lambda b, x: _splat(b, x))
"""x in every lane"""
constant = operation(vector, types.float64)(lambda b, x: _splat(b, b.fptrunc(x, _float)))
"""x, rounded, in every lane"""
fma = operation(vector, vector, vector, vector)(lambda b, x, y, z: _fma(b, x, y, z))
"""x * y + z, rounded once"""
add = operation(vector, vector, vector)(lambda b, x, y: b.fadd(x, y))
sub = operation(vector, vector, vector)(lambda b, x, y: b.fsub(x, y))
mul = operation(vector, vector, vector)(lambda b, x, y: b.fmul(x, y))
div = operation(vector, vector, vector)(lambda b, x, y: b.fdiv(x, y))
root = operation(vector, vector)(lambda b, x: _call(b, "llvm.sqrt.v16f32", _vector, x))
magnitude = operation(vector, vector)(lambda b, x: _call(b, "llvm.fabs.v16f32", _vector, x))


@operation(vector, vector, vector, vector, vector)
def where_less(b: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """yes where x < y, else no"""
    return b.select(b.fcmp_ordered("<", x, y), yes, no)


@operation(vector, vector, vector, vector, vector)
def where_equal(b: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """yes where x == y, else no"""
    return b.select(b.fcmp_ordered("==", x, y), yes, no)


@operation(vector, vector)
def power_of_two(b: Any, x: Any) -> Any:
    """2^n for x = 1.5 * 2^23 + n, whose lowest bits hold the integer n"""
    bits = b.shl(b.bitcast(x, _integers), ir.Constant(_integers, [23] * LANES))
    return b.bitcast(b.add(bits, ir.Constant(_integers, [127 << 23] * LANES)), _vector)


total = operation(number, vector)(lambda b, x: _total(b, x))
"""The sum of the lanes, by halves"""


@operation(tile, array, index, index, index)
def broadcast(b: Any, a: Any, i: Any, stride: Any, n: Any) -> Any:
    """Row t has a[i + t * stride] in every lane, for t < n"""
    return _tile(b, [_splat(b, b.load(b.gep(a, [at]))) for at in _rows(b, i, stride, n)])


zeros = operation(tile)(lambda b: _tile(b, [_same(0)] * ROWS))


@operation(tile, tile, array, index, index, index, vector)
def add_scaled(b: Any, sums: Any, a: Any, i: Any, stride: Any, n: Any, x: Any) -> Any:
    """Adds a[i + t * stride] * x to row t, for t < n"""
    factors = [_splat(b, b.load(b.gep(a, [at]))) for at in _rows(b, i, stride, n)]
    return _tile(b, [_fma(b, factor, x, b.extract_value(sums, t)) for t, factor in enumerate(factors)])


@operation(tile, tile, array, index, array, index, index, vector)
def add_products(b: Any, sums: Any, a: Any, i: Any, taps: Any, q: Any, n: Any, x: Any) -> Any:
    """Adds a[i + taps[q + t] :][:16] * x to row t, for t < n"""
    inputs = [b.add(i, b.load(b.gep(taps, [at]))) for at in _rows(b, q, _index(1), n)]
    return _tile(b, [_fma(b, _read(b, a, at), x, b.extract_value(sums, t)) for t, at in enumerate(inputs)])


@operation(types.void, array, index, index, index, tile)
def put(b: Any, a: Any, i: Any, stride: Any, n: Any, rows: Any) -> None:
    """a[i + t * stride :][:16] = row t, for t < n"""
    # From the last to the first: the rows from n on have the position of row n - 1, which is written after them.
    for t, at in reversed(list(enumerate(_rows(b, i, stride, n)))):
        b.store(b.extract_value(rows, t), _at(b, a, at), align=4)


@operation(types.void, array, index, tile)
def put_totals(b: Any, a: Any, i: Any, rows: Any) -> None:
    """a[i + t] = the sum of the lanes of row t"""
    for t in range(ROWS):
        b.store(_total(b, b.extract_value(rows, t)), b.gep(a, [b.add(i, _index(t))]))


@operation(types.void, array, index, index, array, index, index)
def transpose(b: Any, a: Any, i: Any, stride: Any, out: Any, j: Any, out_stride: Any) -> None:
    """out[j + c * out_stride + r] = a[i + r * stride + c], for r and c below 16"""
    rows = [_read(b, a, b.add(i, b.mul(_index(r), stride))) for r in range(LANES)]
    half = LANES // 2
    low = ir.Constant(_integers, [lane for k in range(half) for lane in (k, LANES + k)])
    high = ir.Constant(_integers, [lane for k in range(half, LANES) for lane in (k, LANES + k)])
    for _ in range(4):  # each pass interleaves rows k and k + 8
        pairs = [(rows[k], rows[k + half]) for k in range(half)]
        rows = [b.shuffle_vector(x, y, mask) for x, y in pairs for mask in (low, high)]
    for c, row in enumerate(rows):
        b.store(row, _at(b, out, b.add(j, b.mul(_index(c), out_stride))), align=4)


# --- functions of vectors


@kernel
def exp(x: Any) -> Any:
    """e^x to 1.2e-7, for x up to 88: Cephes' polynomial on [-ln(2)/2, ln(2)/2]; 0 below -87."""
    clipped = where_less(x, constant(-87.0), constant(-87.0), x)
    magic = constant(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
    shifted = fma(clipped, constant(1.44269504088896341), magic)
    n = sub(shifted, magic)
    r = fma(n, constant(-0.693359375), clipped)
    r = fma(n, constant(2.12194440e-4), r)
    p = fma(constant(1.9875691500e-4), r, constant(1.3981999507e-3))
    p = fma(p, r, constant(8.3334519073e-3))
    p = fma(p, r, constant(4.1665795894e-2))
    p = fma(p, r, constant(1.6666665459e-1))
    p = fma(p, r, constant(5.0000001201e-1))
    p = add(fma(p, mul(r, r), r), constant(1.0))
    return where_less(x, constant(-87.0), constant(0.0), mul(p, power_of_two(shifted)))


@kernel
def tanh(x: Any) -> Any:
    """To 2e-7 of the value: Cephes' polynomial below 0.625, else by exp."""
    size = magnitude(x)
    z = mul(x, x)
    p = fma(constant(-5.70498872745e-3), z, constant(2.06390887954e-2))
    p = fma(p, z, constant(-5.37397155531e-2))
    p = fma(p, z, constant(1.33314422036e-1))
    p = fma(p, z, constant(-3.33332819422e-1))
    small = fma(mul(p, z), x, x)
    bounded = where_less(constant(10.0), size, constant(10.0), size)
    far = sub(constant(1.0), div(constant(2.0), add(exp(add(bounded, bounded)), constant(1.0))))
    large = where_less(x, constant(0.0), sub(constant(0.0), far), far)
    return where_less(size, constant(0.625), small, large)


# --- layers; x and y are positions in an array of activations, w and bias in one of parameters

# Columns of a plan, which has a row for each layer. Sizes of activations are padded to multiples of 16.
KIND, X, X_SIZE, Y, Y_SIZE, WEIGHT, BIAS, C, H, W, OC, OH, OW, KH, KW, SH, SW, TAPS, STATISTICS, BACK = range(
    20
)
LINEAR, CONVOLUTION, NORM, RELU, TANH, MAX_POOL, AVERAGE_POOL, PAD = range(8)
# Columns of jobs: positions of a node's start and result, and of the state's two vectors before and after.
START, RESULT, FIRST_FROM, FIRST, SECOND_FROM, SECOND, STEPS, TAKEN = range(8)
# Values of an optimizer's rule: its options, and the values that depend on the step.
(RULE, MOMENTUM, DAMPENING, NESTEROV, DECAY, BETA1, BETA2, EPSILON, DECOUPLED, CLIP) = range(10)
RATE, FRESH, SHRINK, SCALE = range(10, 14)
GRADIENT, SGD, ADAM = range(3)
CROSS_ENTROPY, SQUARED_ERROR = range(2)


@kernel
def linear(
    p: Array, w: int, strides: Any, bias: int, a: Array, x: int, y: int, inputs: int, outputs: int
) -> None:
    """y = W x + b. ``strides`` lead from one output and from one input to the next in W, so W^T dy is a special case."""
    down, right = strides
    for o in range(0, outputs, ROWS):
        n = min(ROWS, outputs - o)
        sums = zeros() if bias < 0 else broadcast(p, bias + o, 1, n)
        for k in range(inputs):
            sums = add_scaled(sums, p, w + o * down + k * right, down, n, load(a, x + k * LANES))
        put(a, y + o * LANES, LANES, n, sums)


@kernel
def linear_update(
    step: Any, layer: Array, a: Array, rows: int, width: int, dy: int, batch: int, spare: int
) -> None:
    """The gradient of the weights, whose input is in rows of samples, with the update of each tile of it."""
    inputs, outputs, w = layer[C], layer[OC], layer[WEIGHT]
    for o in range(0, outputs, ROWS):
        n = min(ROWS, outputs - o)
        for k in range(0, inputs, LANES):
            sums = zeros()
            for s in range(batch):
                d = dy + (s // LANES) * layer[Y_SIZE] * LANES + o * LANES + s % LANES
                sums = add_scaled(sums, a, d, LANES, n, load(a, rows + s * width + k))
            put(a, spare, LANES, ROWS, sums)
            for t in range(n):
                change(step, w + (o + t) * inputs + k, a, spare + t * LANES, min(LANES, inputs - k))


@kernel
def bias_update(step: Any, layer: Array, a: Array, dy: int, groups: int, spare: int) -> None:
    """Steps the biases, whose gradients are sums over samples and places."""
    channels, area = layer[OC], layer[OH] * layer[OW]
    for o in range(channels):
        sums = constant(0.0)
        for g in range(groups):
            for k in range(area):
                sums = add(sums, load(a, dy + (g * layer[Y_SIZE] + o * area + k) * LANES))
        a[spare + o] = total(sums)
    change(step, layer[BIAS], a, spare, channels)


@kernel
def convolution(p: Array, layer: Array, taps: Array, a: Array, x: int, y: int) -> None:
    """A correlation without padding, with filters as [channels, taps]."""
    count, area = layer[C] * layer[KH] * layer[KW], layer[OH] * layer[OW]
    for o in range(0, layer[OC], ROWS):
        n = min(ROWS, layer[OC] - o)
        for i in range(layer[OH]):
            for j in range(0, layer[OW], 2):  # two places at a time share the weights
                first = x + (i * layer[SH] * layer[W] + j * layer[SW]) * LANES
                pair = 1 if j + 1 < layer[OW] else 0
                second = first + pair * layer[SW] * LANES
                sums = zeros() if layer[BIAS] < 0 else broadcast(p, layer[BIAS] + o, 1, n)
                sums2 = sums
                for q in range(count):
                    at = layer[WEIGHT] + o * count + q
                    sums = add_scaled(sums, p, at, count, n, load(a, first + taps[q]))
                    sums2 = add_scaled(sums2, p, at, count, n, load(a, second + taps[q]))
                result = y + (o * area + i * layer[OW] + j) * LANES
                put(a, result, area * LANES, n, sums)
                put(a, result + pair * LANES, area * LANES, n, sums2)


@kernel
def convolution_backward(p: Array, layer: Array, taps: Array, a: Array, dx: int, dy: int, spare: int) -> None:
    """Adds the gradients of the inputs to ``dx``."""
    count, area = layer[C] * layer[KH] * layer[KW], layer[OH] * layer[OW]
    for i in range(layer[OH]):
        for j in range(0, layer[OW], 2):
            first = dx + (i * layer[SH] * layer[W] + j * layer[SW]) * LANES
            pair = 1 if j + 1 < layer[OW] else 0
            source = dy + (i * layer[OW] + j) * LANES
            for q in range(0, count, ROWS):
                n, sums, sums2 = min(ROWS, count - q), zeros(), zeros()
                for o in range(layer[OC]):
                    at = layer[WEIGHT] + o * count + q
                    d = source + o * area * LANES
                    sums = add_scaled(sums, p, at, 1, n, load(a, d))
                    sums2 = add_scaled(sums2, p, at, 1, n, load(a, d + pair * LANES))
                put(a, spare + q * LANES, LANES, n, sums)
                put(a, spare + (count + q) * LANES, LANES, n, sums2)
            for k in range((1 + pair) * count):
                target = first + taps[k % count] + k // count * layer[SW] * LANES
                store(a, target, add(load(a, target), load(a, spare + k * LANES)))


@kernel
def convolution_update(
    step: Any, layer: Array, taps: Array, a: Array, x: int, dy: int, groups: int, spare: int
) -> None:
    """Steps the filters."""
    count, area, channels = layer[C] * layer[KH] * layer[KW], layer[OH] * layer[OW], layer[OC]
    length = -(-count // LANES) * LANES
    for o in range(0, channels, 2):  # two channels at a time share the inputs
        pair = 1 if o + 1 < channels else 0
        for q in range(0, count, ROWS):
            n, sums, sums2 = min(ROWS, count - q), zeros(), zeros()
            for g in range(groups):
                source = dy + (g * layer[Y_SIZE] + o * area) * LANES
                for i in range(layer[OH]):
                    for j in range(layer[OW]):
                        first = x + (g * layer[X_SIZE] + i * layer[SH] * layer[W] + j * layer[SW]) * LANES
                        d = source + (i * layer[OW] + j) * LANES
                        sums = add_products(sums, a, first, taps, q, n, load(a, d))
                        sums2 = add_products(sums2, a, first, taps, q, n, load(a, d + pair * area * LANES))
            put_totals(a, spare + q, sums)
            put_totals(a, spare + length + q, sums2)
        for t in range(1 + pair):
            change(step, layer[WEIGHT] + (o + t) * count, a, spare + t * length, count)


@kernel
def norm(p: Array, layer: Array, epsilon: float, a: Array, x: int, y: int, statistics: int) -> None:
    """Group normalisation (Wu and He, 2018), with KH groups; statistics are the mean and 1 / deviation of each."""
    channels, area = layer[C] // layer[KH], layer[H] * layer[W]
    size = channels * area
    for g in range(layer[KH]):
        first, mean, squares = x + g * size * LANES, constant(0.0), constant(0.0)
        for k in range(size):
            mean = add(mean, load(a, first + k * LANES))
        mean = div(mean, constant(size))
        for k in range(size):
            d = sub(load(a, first + k * LANES), mean)
            squares = fma(d, d, squares)
        scale = div(constant(1.0), root(add(div(squares, constant(size)), constant(epsilon))))
        store(a, statistics + 2 * g * LANES, mean)
        store(a, statistics + (2 * g + 1) * LANES, scale)
        for c in range(g * channels, (g + 1) * channels):
            factor = mul(scale, splat(p[layer[WEIGHT] + c]))
            bias = splat(p[layer[BIAS] + c])
            for k in range(c * area, (c + 1) * area):
                store(a, y + k * LANES, fma(sub(load(a, x + k * LANES), mean), factor, bias))


@kernel
def norm_backward(
    p: Array, layer: Array, a: Array, x: int, dx: int, dy: int, statistics: int, sums: int
) -> None:
    """Adds the gradients of the weights and biases, sample by sample, to the ``sums``."""
    channels, area = layer[C] // layer[KH], layer[H] * layer[W]
    size = constant(channels * area)
    for g in range(layer[KH]):
        mean, scale = load(a, statistics + 2 * g * LANES), load(a, statistics + (2 * g + 1) * LANES)
        gradients, products = constant(0.0), constant(0.0)
        for c in range(g * channels, (g + 1) * channels):
            gradient, product = constant(0.0), constant(0.0)
            for k in range(c * area, (c + 1) * area):
                d = load(a, dy + k * LANES)
                gradient = add(gradient, d)
                product = fma(d, mul(sub(load(a, x + k * LANES), mean), scale), product)
            store(a, sums + 2 * c * LANES, add(load(a, sums + 2 * c * LANES), product))
            store(a, sums + (2 * c + 1) * LANES, add(load(a, sums + (2 * c + 1) * LANES), gradient))
            weight = splat(p[layer[WEIGHT] + c])
            gradients, products = fma(gradient, weight, gradients), fma(product, weight, products)
        gradients, products = div(gradients, size), div(products, size)
        for c in range(g * channels, (g + 1) * channels):
            weight = splat(p[layer[WEIGHT] + c])
            for k in range(c * area, (c + 1) * area):
                z = mul(sub(load(a, x + k * LANES), mean), scale)
                d = sub(fma(load(a, dy + k * LANES), weight, sub(constant(0.0), gradients)), mul(z, products))
                store(a, dx + k * LANES, mul(d, scale))


@kernel
def norm_update(step: Any, layer: Array, a: Array, sums: int, spare: int) -> None:
    """Steps the weights and the biases by the sums of :func:`norm_backward`."""
    for part in range(2):
        for c in range(layer[C]):
            a[spare + c] = total(load(a, sums + (2 * c + part) * LANES))
        change(step, layer[WEIGHT] if part == 0 else layer[BIAS], a, spare, layer[C])


@kernel
def activate(kind: int, a: Array, x: int, y: int, size: int) -> None:
    """ReLU or tanh of some vectors."""
    for k in range(0, size * LANES, LANES):
        v = load(a, x + k)
        store(a, y + k, tanh(v) if kind == TANH else where_less(v, constant(0.0), constant(0.0), v))


@kernel
def activate_backward(kind: int, a: Array, y: int, d: int, size: int) -> None:
    """In place."""
    for k in range(0, size * LANES, LANES):
        v, g = load(a, y + k), load(a, d + k)
        if kind == TANH:
            store(a, d + k, mul(g, fma(sub(constant(0.0), v), v, constant(1.0))))
        else:
            store(a, d + k, where_less(constant(0.0), v, g, constant(0.0)))


@kernel
def pool(layer: Array, a: Array, x: int, y: int) -> None:
    """The largest or the mean value of each window."""
    share, largest = constant(1.0 / (layer[KH] * layer[KW])), layer[KIND] == MAX_POOL
    for c in range(layer[C]):
        for i in range(layer[OH]):
            for j in range(layer[OW]):
                first = x + ((c * layer[H] + i * layer[SH]) * layer[W] + j * layer[SW]) * LANES
                v = load(a, first) if largest else constant(0.0)
                for u in range(layer[KH]):
                    for t in range(layer[KW]):
                        z = load(a, first + (u * layer[W] + t) * LANES)
                        # (NaN is kept.)
                        v = where_equal(v, v, where_less(z, v, v, z), v) if largest else add(v, z)
                store(a, y + ((c * layer[OH] + i) * layer[OW] + j) * LANES, v if largest else mul(v, share))


@kernel
def pool_backward(layer: Array, a: Array, x: int, y: int, dx: int, dy: int) -> None:
    """The gradient of a largest value goes to the first input that has it."""
    share, largest = constant(1.0 / (layer[KH] * layer[KW])), layer[KIND] == MAX_POOL
    for c in range(layer[C]):
        for i in range(layer[OH]):
            for j in range(layer[OW]):
                first = ((c * layer[H] + i * layer[SH]) * layer[W] + j * layer[SW]) * LANES
                at = ((c * layer[OH] + i) * layer[OW] + j) * LANES
                d, v = load(a, dy + at), load(a, y + at)
                if not largest:
                    d = mul(d, share)
                for u in range(layer[KH]):
                    for t in range(layer[KW]):
                        k = first + (u * layer[W] + t) * LANES
                        part = d
                        if largest:
                            z = load(a, x + k)
                            part, d = where_equal(z, v, d, constant(0.0)), where_equal(z, v, constant(0.0), d)
                        store(a, dx + k, add(load(a, dx + k), part))


@kernel
def pad(layer: Array, a: Array, x: int, y: int, back: bool) -> None:
    """Copies an image into the middle of a larger one, or back."""
    for c in range(layer[C]):
        for i in range(layer[H]):
            inner = x + (c * layer[H] + i) * layer[W] * LANES
            outer = y + ((c * layer[OH] + i + layer[KH]) * layer[OW] + layer[KW]) * LANES
            for k in range(0, layer[W] * LANES, LANES):
                if back:
                    store(a, inner + k, load(a, outer + k))
                else:
                    store(a, outer + k, load(a, inner + k))


@kernel
def clear(a: Array, x: int, size: int) -> None:
    """Writes zeros."""
    for k in range(0, size * LANES, LANES):
        store(a, x + k, constant(0.0))


# --- losses: the mean over the batch; z, the outputs, become their gradients


@kernel
def cross_entropy(
    labels: Array, batch: Array, first: int, factor: float, a: Array, z: int, classes: int, spare: int
) -> float:
    """Cross-entropy with class numbers as targets, times a factor."""
    highest = load(a, z)
    for c in range(1, classes):
        v = load(a, z + c * LANES)
        highest = where_less(highest, v, v, highest)
    sums = constant(0.0)
    store(a, spare, highest)
    for s in range(min(LANES, len(batch) - first)):
        a[spare + 2 * LANES + s] = a[z + labels[batch[first + s]] * LANES + s]
    for c in range(classes):
        e = exp(sub(load(a, z + c * LANES), highest))
        sums = add(sums, e)
        store(a, z + c * LANES, e)
    store(a, spare + LANES, sums)
    count = min(LANES, len(batch) - first)
    share = np.float32(factor) / np.float32(len(batch))
    store(a, spare + 3 * LANES, constant(0.0))
    store_first(a, spare + 3 * LANES, count, splat(share))  # samples that only fill the vector do not count
    scale = div(load(a, spare + 3 * LANES), sums)
    for c in range(classes):
        store(a, z + c * LANES, mul(load(a, z + c * LANES), scale))
    loss = 0.0
    for s in range(count):
        a[z + labels[batch[first + s]] * LANES + s] -= share
        loss += math.log(a[spare + LANES + s]) + a[spare + s] - a[spare + 2 * LANES + s]
    return loss * factor / len(batch)


@kernel
def squared_error(
    values: Array, batch: Array, first: int, factor: float, a: Array, z: int, size: int
) -> float:
    """The mean squared error, times a factor."""
    loss = 0.0
    share = np.float32(2 * factor / (size * len(batch)))
    for c in range(size):
        for s in range(LANES):
            at, d = z + c * LANES + s, np.float32(0)
            if first + s < len(batch):
                d = a[at] - values[batch[first + s] * size + c]
                loss += np.float64(d) * np.float64(d)
            a[at] = d * share
    return loss * factor / (size * len(batch))


# --- optimizers


@kernel
def change(step: Any, i: int, a: Array, gradient: int, count: int) -> None:
    """Steps parameters from ``i`` on by their gradients, and the optimizer's state with them; or stores the gradients. A step
    is the store, the positions of the parameters and the state's vectors, each before and after, and the optimizer's rule."""
    p, (before, after, first_from, first, second_from, second), rule = step
    for k in range(0, count, LANES):
        n, g = min(LANES, count - k), load(a, gradient + k)
        if rule[CLIP] < np.inf:
            upper, lower = splat(rule[CLIP]), splat(-rule[CLIP])
            g = where_less(upper, g, upper, where_less(g, lower, lower, g))
        if rule[RULE] == GRADIENT:
            store_first(p, after + i + k, n, g)
            continue
        v = load_first(p, before + i + k, n)
        if rule[DECAY] != 0:
            g = fma(splat(rule[DECAY]), v, g)
        if rule[RULE] == ADAM:
            m = load_first(p, first_from + i + k, n)
            s = load_first(p, second_from + i + k, n)
            m = fma(sub(g, m), splat(np.float32(1) - rule[BETA1]), m)
            s = fma(mul(g, g), splat(np.float32(1) - rule[BETA2]), mul(s, splat(rule[BETA2])))
            store_first(p, first + i + k, n, m)
            store_first(p, second + i + k, n, s)
            g = div(m, fma(root(s), splat(rule[SCALE]), splat(rule[EPSILON])))
            v = mul(v, splat(rule[SHRINK]))
        elif rule[MOMENTUM] != 0:
            m = mul(load_first(p, first_from + i + k, n), splat(rule[MOMENTUM]))
            m = fma(g, splat(rule[FRESH]), m)
            store_first(p, first + i + k, n, m)
            g = fma(m, splat(rule[MOMENTUM]), g) if rule[NESTEROV] != 0 else m
        store_first(p, after + i + k, n, fma(splat(-rule[RATE]), g, v))


@kernel
def prepare(rule: Array, options: Array, lr: float, taken: int) -> None:
    """The values of a step's rule, after ``taken`` steps."""
    for k in range(len(options)):
        rule[k] = np.float32(options[k])
    rule[FRESH] = np.float32(1 - options[DAMPENING] if taken else 1.0)
    rule[RATE], rule[SHRINK] = np.float32(lr), np.float32(1)
    if options[RULE] != ADAM:
        return
    first, second = 1 - options[BETA1] ** (taken + 1), 1 - options[BETA2] ** (taken + 1)
    rule[RATE], rule[SCALE] = np.float32(lr / first), np.float32(1 / math.sqrt(second))
    if options[DECOUPLED] != 0:
        rule[DECAY], rule[SHRINK] = np.float32(0), np.float32(1 - lr * options[DECAY])


# --- steps


@kernel
def forward(p: Array, layer: Array, taps: Array, epsilon: float, a: Array, groups: int) -> None:
    """The results of a layer."""
    kind = layer[KIND]
    for g in range(groups):
        x = (layer[X] * groups + g * layer[X_SIZE]) * LANES
        y = (layer[Y] * groups + g * layer[Y_SIZE]) * LANES
        if kind == LINEAR:
            linear(p, layer[WEIGHT], (layer[C], 1), layer[BIAS], a, x, y, layer[C], layer[OC])
        elif kind == CONVOLUTION:
            convolution(p, layer, taps, a, x, y)
        elif kind == NORM:
            norm(p, layer, epsilon, a, x, y, (layer[STATISTICS] * groups + 2 * g * layer[KH]) * LANES)
        elif kind in (RELU, TANH):
            activate(kind, a, x, y, layer[OC] * layer[OH] * layer[OW])
        elif kind == PAD:
            clear(a, y, layer[Y_SIZE])
            pad(layer, a, x, y, False)
        else:
            pool(layer, a, x, y)


@kernel
def backward(
    p: Array, layer: Array, taps: Array, a: Array, dx: int, dy: int, groups: int, sums: int, spare: int
) -> None:
    """The gradients ``dx`` of a layer's inputs; for an activation they replace ``dy``."""
    kind = layer[KIND]
    if kind == NORM:
        clear(a, sums, 2 * layer[C])
    for g in range(groups):
        x = (layer[X] * groups + g * layer[X_SIZE]) * LANES
        y = (layer[Y] * groups + g * layer[Y_SIZE]) * LANES
        ix, iy = dx + g * layer[X_SIZE] * LANES, dy + g * layer[Y_SIZE] * LANES
        if kind == LINEAR:
            linear(p, layer[WEIGHT], (1, layer[C]), -1, a, iy, ix, layer[OC], layer[C])
        elif kind == CONVOLUTION:
            clear(a, ix, layer[X_SIZE])
            convolution_backward(p, layer, taps, a, ix, iy, spare)
        elif kind == NORM:
            statistics = (layer[STATISTICS] * groups + 2 * g * layer[KH]) * LANES
            norm_backward(p, layer, a, x, ix, iy, statistics, sums)
        elif kind in (RELU, TANH):
            activate_backward(kind, a, y, iy, layer[OC] * layer[OH] * layer[OW])
        elif kind == PAD:
            pad(layer, a, ix, iy, True)
        else:
            clear(a, ix, layer[X_SIZE])
            pool_backward(layer, a, x, y, ix, iy)


@kernel
def update(
    step: Any, layer: Array, taps: Array, a: Array, dy: int, batch: int, rows: int, sums: int, spare: int
) -> None:
    """Steps the parameters of a layer; the input of a linear one is in ``rows`` of samples."""
    groups = -(-batch // LANES)
    x = layer[X] * groups * LANES
    if layer[KIND] == NORM:
        norm_update(step, layer, a, sums, spare)
        return
    if layer[KIND] == CONVOLUTION:
        convolution_update(step, layer, taps, a, x, dy, groups, spare)
    else:
        linear_update(step, layer, a, rows, layer[X_SIZE], dy, batch, spare)
    if layer[BIAS] >= 0:
        bias_update(step, layer, a, dy, groups, spare)


@kernel
def to_rows(a: Array, x: int, size: int, groups: int, rows: int) -> None:
    """Turns lanes into rows of samples."""
    for g in range(groups):
        for k in range(0, size, LANES):
            transpose(a, x + (g * size + k) * LANES, LANES, a, rows + g * LANES * size + k, size)


@kernel
def fill(data: Array, batch: Array, length: int, size: int, a: Array, rows: int) -> None:
    """Copies the samples of a batch to rows, with the last one again until a vector is full."""
    for s in range(-(-len(batch) // LANES) * LANES):
        sample = batch[min(s, len(batch) - 1)] * length
        for k in range(0, length, LANES):
            store(a, rows + s * size + k, load_first(data, sample + k, min(LANES, length - k)))


@partial(compiled, error_model="numpy")
def train(
    memory: Array, work: Any, data: Any, loss: Any, options: Array, model: Any, a: Array, losses: Array
) -> None:
    """Some local steps of some nodes, one node after the other.

    Args:
        memory: the store of vectors.
        work: jobs [nodes, 8] with positions in the store, the nodes' learning rates, and of all steps, in order, the batch
            sizes and the numbers of the samples.
        data: inputs, class numbers and target values of all samples, flat.
        loss: its kind, and its factor.
        options: those of the optimizer.
        model: the layers; see :class:`gossamer.learning.fused.plan.FusedPlan`.
        a: memory for activations.
        losses: the mean loss of each node's steps, which is written."""
    (jobs, rates, sizes, samples), (features, labels, values), (loss_kind, factor) = work, data, loss
    plan, epsilons, taps, spaces = model
    rule, cursor, step = np.empty(14, np.float32), 0, 0
    ends, length, input_size, largest, widest, most_sums = spaces
    for node in range(len(jobs)):
        job, mean = jobs[node], 0.0
        at = (job[START], job[RESULT], job[FIRST_FROM], job[FIRST], job[SECOND_FROM], job[SECOND])
        for taken in range(job[STEPS]):
            count = sizes[step]
            batch = samples[cursor : cursor + count]
            groups = -(-count // LANES)
            cursor, step = cursor + count, step + 1
            inputs = ends * groups * LANES
            rows = inputs + groups * input_size * LANES
            dy = rows + groups * widest * LANES
            dx = dy + groups * largest * LANES
            sums = dx + groups * largest * LANES
            spare = sums + most_sums * LANES
            p = memory[at[0] :]
            prepare(rule, options, rates[node], job[TAKEN] + taken)
            fill(features, batch, length, input_size, a, inputs)
            for g in range(groups):
                for k in range(0, input_size, LANES):
                    row = inputs + g * LANES * input_size + k
                    transpose(a, row, input_size, a, (g * input_size + k) * LANES, LANES)
            for number in range(len(plan)):
                forward(p, plan[number], taps[plan[number, TAPS] :], epsilons[number], a, groups)
            last = plan[len(plan) - 1]
            batch_loss = 0.0
            for g in range(groups):
                z = dy + g * last[Y_SIZE] * LANES
                for k in range(last[OC]):
                    store(a, z + k * LANES, load(a, (last[Y] * groups + g * last[Y_SIZE] + k) * LANES))
                if loss_kind == CROSS_ENTROPY:
                    batch_loss += cross_entropy(labels, batch, g * LANES, factor, a, z, last[OC], spare)
                else:
                    batch_loss += squared_error(values, batch, g * LANES, factor, a, z, last[OC])
            mean += np.float64(np.float32(batch_loss))
            for number in range(len(plan) - 1, -1, -1):
                layer = plan[number]
                layer_taps = taps[layer[TAPS] :]
                if layer[BACK]:
                    backward(p, layer, layer_taps, a, dx, dy, groups, sums, spare)
                if layer[WEIGHT] >= 0:
                    layer_inputs = inputs
                    if layer[KIND] == LINEAR and layer[X] > 0:
                        layer_inputs = rows
                        to_rows(a, layer[X] * groups * LANES, layer[X_SIZE], groups, rows)
                    update((memory, at, rule), layer, layer_taps, a, dy, count, layer_inputs, sums, spare)
                if layer[BACK] and layer[KIND] != RELU and layer[KIND] != TANH:
                    dx, dy = dy, dx
            at = (job[RESULT], job[RESULT], job[FIRST], job[FIRST], job[SECOND], job[SECOND])
        losses[node] = mean / max(job[STEPS], 1)
