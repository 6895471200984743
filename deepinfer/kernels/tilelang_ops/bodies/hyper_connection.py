"""mHC residual streams of one row: post-mix, and what the next sub-layer takes from them."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies.rows import rms_factor, wide

LANES = 128  # columns that are added up side by side


@T.macro
def hc_post(h, y, post, comb, out, row, to, hc, dim):
    """out[to, j, :] = post[row, j] * y[row, :] + sum_i comb[row, i, j] * h[row, i, :]."""
    value = T.alloc_fragment((hc, dim), "float32")
    for j, d in T.Parallel(hc, dim):
        value[j, d] = post[row, j] * wide(y[row, d])
        for i in T.serial(hc):
            value[j, d] += comb[row, i, j] * wide(h[row, i, d])
    for j, d in T.Parallel(hc, dim):
        out[to, j, d] = value[j, d]


def sigmoid(x):
    return 1.0 / (1.0 + T.exp(-x))


@T.macro
def products(h, fn, u, row, hc, dim, rms_eps):
    """u[m] = fn[m, :] . z over the root mean square of z = h[row, :, :] flattened, for hc * (2 + hc) rows of fn."""
    mixes = hc * (2 + hc)
    sums = T.alloc_fragment((mixes, LANES), "float32")
    squares = T.alloc_fragment((1, LANES), "float32")
    dots = T.alloc_fragment((mixes,), "float32")
    total = T.alloc_fragment((1,), "float32")
    factor = T.alloc_shared((1,), "float32")
    T.clear(sums)
    T.clear(squares)
    for part in T.serial(hc * dim // LANES):
        for m, j in T.Parallel(mixes, LANES):
            at = part * LANES + j
            sums[m, j] += fn[m, at] * wide(h[row, at // dim, at % dim])
        for i, j in T.Parallel(1, LANES):
            at = part * LANES + j
            squares[i, j] += wide(h[row, at // dim, at % dim]) * wide(h[row, at // dim, at % dim])
    T.reduce_sum(sums, dots, dim=1)
    T.reduce_sum(squares, total, dim=1)
    for i in T.Parallel(1):
        factor[i] = rms_factor(total[i], hc * dim, rms_eps)
    for m in T.Parallel(mixes):
        u[m] = dots[m] * factor[0]


def row_total(c, i, hc):
    total = c[i, 0]
    for j in range(1, hc):
        total = total + c[i, j]
    return total


def column_total(c, j, hc):
    total = c[0, j]
    for i in range(1, hc):
        total = total + c[i, j]
    return total


def row_largest(c, i, hc):
    largest = c[i, 0]
    for j in range(1, hc):
        largest = T.max(largest, c[i, j])
    return largest


def coefficients(u, scale, base, c, c_next, pre, post, comb, to, hc, iterations, hc_eps):
    """pre[to, :], post[to, :] and comb[to, :, :] of the products u, by Sinkhorn's iterations; c and c_next [hc, hc].

    The iterations are unrolled: inside a loop of few threads no barrier would part them.
    """
    begin(u, scale, base, c, c_next, pre, post, to, hc, hc_eps)
    for _ in range(iterations - 1):
        iterate(c, c_next, hc, hc_eps)
    finish(c_next, comb, to, hc)


@T.macro
def begin(u, scale, base, c, c_next, pre, post, to, hc, hc_eps):
    for j in T.Parallel(hc):
        pre[to, j] = sigmoid(u[j] * scale[0] + base[j]) + hc_eps
        post[to, j] = 2.0 * sigmoid(u[hc + j] * scale[1] + base[hc + j])
    for i, j in T.Parallel(hc, hc):
        at = 2 * hc + i * hc + j
        c[i, j] = u[at] * scale[2] + base[at]
    for i, j in T.Parallel(hc, hc):
        c_next[i, j] = T.exp(c[i, j] - row_largest(c, i, hc))
    for i, j in T.Parallel(hc, hc):
        c[i, j] = c_next[i, j] / row_total(c_next, i, hc) + hc_eps
    for i, j in T.Parallel(hc, hc):
        c_next[i, j] = c[i, j] / (column_total(c, j, hc) + hc_eps)


@T.macro
def iterate(c, c_next, hc, hc_eps):
    for i, j in T.Parallel(hc, hc):
        c[i, j] = c_next[i, j] / (row_total(c_next, i, hc) + hc_eps)
    for i, j in T.Parallel(hc, hc):
        c_next[i, j] = c[i, j] / (column_total(c, j, hc) + hc_eps)


@T.macro
def finish(c_next, comb, to, hc):
    for i, j in T.Parallel(hc, hc):
        comb[to, i, j] = c_next[i, j]


@T.macro
def mix_in(h, p_prev, norm_weight, x, row, mix_row, to, hc, dim, rms_eps, dtype):
    """x[to, :] = norm of the streams h[row] weighted by p_prev[mix_row, :], rounded to `dtype` before the norm."""
    mixed = T.alloc_fragment((1, dim), "float32")
    square = T.alloc_fragment((1, dim), "float32")
    total = T.alloc_fragment((1,), "float32")
    for i, d in T.Parallel(1, dim):
        mixed[i, d] = p_prev[mix_row, 0] * wide(h[row, 0, d])
        for stream in T.serial(1, hc):
            mixed[i, d] += p_prev[mix_row, stream] * wide(h[row, stream, d])
    for i, d in T.Parallel(1, dim):
        mixed[i, d] = formats.rounded(mixed[i, d], dtype)
        square[i, d] = mixed[i, d] * mixed[i, d]
    T.reduce_sum(square, total, dim=1)
    for i, d in T.Parallel(1, dim):
        x[to, d] = wide(norm_weight[d]) * (mixed[i, d] * rms_factor(total[i], dim, rms_eps))
