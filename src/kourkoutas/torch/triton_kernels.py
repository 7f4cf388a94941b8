"""The step's Triton kernels: all tensors of one kind in one launch, whatever their number.

A kernel finds its tensors through a table with a column per tensor; `tensors` tells every program the column that is
its own. A program takes one block: `BLOCK` elements, or what is left at the end of a tensor.

    measure   Σ g² and, if asked for, Σ |θ| of each block
    total     the sum over the blocks of each tensor, or its square root
    update    m, v, v_max and θ; if asked for, Σ |θ| of each block as θ was before
    correct   θ of tensors whose ⟨|θ|⟩ turned out to be larger than `update` took it for
    note      addresses into a table, for CUDA graphs

NOTE: same bits whatever the order in which programs run. One program per tensor adds the sums of its blocks, in a fixed
order; nothing is added atomically.

NOTE: a whole block, in a tensor whose addresses are all multiples of 16, is read and written 128 bits at a time, other
blocks element by element. Both ways stand in the same kernel, so that one launch does for all tensors.

NOTE: adaptive_tiny needs max(⟨|θ|⟩, 1) before θ moves, and reading θ once more for it would take a tenth of the step.
As it mostly is 1, `update` takes it for 1 and sums |θ| while it reads θ; where ⟨|θ|⟩ is larger, `correct` moves θ by
the difference, which m and v̂ still tell. The C kernel does the same.

NOTE: complex tensors are pairs of reals, as in torch.optim.Adam.
"""

import triton
import triton.language as tl

BLOCK = 1024
LANES = 1024  # partial sums in `total`
WARPS = 4
ROWS = 11
"""Rows of the table, 64-bit numbers: the addresses, and then

SIZE         how many real numbers the tensor has
FIRST_BLOCK  the number of its first block
ALIGNED      1 if all its addresses are multiples of 16
COLUMN       its place in vectors with an entry per parameter of this step
PLACE        its number in the param group
ELEMENT      the number of its first element in the whole tensor, of which it may be a shard
"""
THETA, GRAD, M, V, V_MAX, SIZE, FIRST_BLOCK, ALIGNED, COLUMN, PLACE, ELEMENT = map(tl.constexpr, range(ROWS))

# Rows of the coefficients, as in `rule.Coefficients`; MOVES is 0 for a parameter that stays as it is.
C1, C2, RATE, FLOOR, LIMIT, FADE, LEAK, MOVES = map(tl.constexpr, range(8))


@triton.jit
def _begin(entry, ROW: tl.constexpr, count, first, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Pointer to element `first` of the tensor that an entry of the table tells of."""
    address = tl.load(entry + ROW * count).to(tl.pointer_type(dtype))
    if WIDE:
        address = tl.multiple_of(address, 16)
    return address + first


@triton.jit
def _read(begin, left, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of a block in the dtype of its arithmetic."""
    i = tl.arange(0, BLOCK)
    x = tl.load(begin + i) if WIDE else tl.load(begin + i, mask=i < left, other=0)
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def _rounded(x, noise):
    """float32 → a float32 that is a bfloat16: `noise`, 16 bits, decides how much must be cut off to round up."""
    bits = x.to(tl.uint32, bitcast=True)
    up = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, up)


@triton.jit
def _write(begin, x, left, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block in the dtype of its tensor, rounded to nearest."""
    i = tl.arange(0, BLOCK)
    if begin.dtype.element_ty == tl.bfloat16:  # as Triton's interpreter does not; what is a bfloat16 already stays so
        last_bit = (x.to(tl.uint32, bitcast=True) >> 16) & 1
        x = _rounded(x, last_bit + 0x7FFF)
    x = x.to(begin.dtype.element_ty)
    if WIDE:
        tl.store(begin + i, x)
    else:
        tl.store(begin + i, x, mask=i < left)


@triton.jit
def _square_sum(g):
    """Σ g², in float64; of float32 in units of the largest |g|, as g² overflows from 2e19 on."""
    if g.dtype == tl.float64:
        return tl.sum(g * g)
    largest = tl.max(tl.abs(g))
    unit = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
    g = g / unit
    unit = unit.to(tl.float64)
    return tl.sum(g * g).to(tl.float64) * unit * unit


@triton.jit
def _abs_sum(x, BLOCK: tl.constexpr):
    """Σ |x|, in float64; of float32 in units of BLOCK, which is a power of 2, so that it does not overflow."""
    if x.dtype == tl.float64:
        return tl.sum(tl.abs(x))
    return tl.sum(tl.abs(x) / BLOCK).to(tl.float64) * BLOCK


@triton.jit
def _measure_block(sums, entry, count, first, left, P: tl.constexpr, G: tl.constexpr, MEAN, WIDE: tl.constexpr, BLOCK):
    block = tl.program_id(0)
    g = _begin(entry, GRAD, count, first, G, WIDE)
    tl.store(sums + block, _square_sum(_read(g, left, WIDE, BLOCK)))
    if MEAN:
        theta = _begin(entry, THETA, count, first, P, WIDE)
        tl.store(sums + tl.num_programs(0) + block, _abs_sum(_read(theta, left, WIDE, BLOCK), BLOCK))


@triton.jit(do_not_specialize=["count"])
def measure(sums, table, tensors, count, P: tl.constexpr, G: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Into `sums`: Σ g² of each block and, with MEAN, behind them Σ |θ| of each block."""
    entry = table + tl.load(tensors + tl.program_id(0))
    first = (tl.program_id(0) - tl.load(entry + FIRST_BLOCK * count)) * BLOCK
    left = tl.load(entry + SIZE * count) - first
    if (tl.load(entry + ALIGNED * count) == 1) & (left >= BLOCK):
        _measure_block(sums, entry, count, first, left, P, G, MEAN, True, BLOCK)
    else:
        _measure_block(sums, entry, count, first, left, P, G, MEAN, False, BLOCK)


@triton.jit(do_not_specialize=["count"])
def total(out, sums, table, count, ROOT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Into `out`, which has an entry per parameter of the step: the sum over the blocks of a tensor, or its root."""
    entry = table + tl.program_id(0)
    first = tl.load(entry + FIRST_BLOCK * count)
    last = first + (tl.load(entry + SIZE * count) + BLOCK - 1) // BLOCK
    lanes = tl.zeros((LANES,), tl.float64)
    for start in range(first, last, LANES):
        block = start + tl.arange(0, LANES)
        lanes += tl.load(sums + block, mask=block < last, other=0)
    found = tl.sum(lanes)
    tl.store(out + tl.load(entry + COLUMN * count), tl.sqrt(found) if ROOT else found)


@triton.jit
def _mixed(h):
    """A hash of 32 bits; _native/formats.h has the same."""
    h = (h ^ (h >> 16)) * 0x45D9F3B5
    h = (h ^ (h >> 13)) * 0x3C6EF373
    return h ^ (h >> 16)


@triton.jit
def _noise(steps, entry, count, first, BLOCK: tl.constexpr):
    """32 bits for every element of a block: a hash of step, place and element, alike on all routes."""
    place = tl.load(entry + PLACE * count)
    t = tl.load(steps + place).to(tl.int64).to(tl.uint32)
    seed = _mixed(_mixed(t) + place.to(tl.uint32))
    first = (first + tl.load(entry + ELEMENT * count)).to(tl.uint32)
    return _mixed((first + tl.arange(0, BLOCK).to(tl.uint32)) * 0x1E3779B1 + seed)


@triton.jit
def _coefficient(cell, given, ROW: tl.constexpr, width, otherwise):
    """A coefficient in float64; `otherwise` if there is none: bit ROW of `given` says so."""
    return tl.load(cell + ROW * width, mask=((given >> ROW) & 1) != 0, other=otherwise)


@triton.jit
def _delta(m, v_hat, rate, floor, limit):
    """Δ = rate·m / (√v̂ + floor), clipped to ±limit."""
    if m.dtype == tl.float64:
        delta = rate * m / (tl.sqrt(v_hat) + floor)
    else:
        delta = tl.div_rn(rate * m, tl.sqrt_rn(v_hat) + floor)
    delta = tl.where(delta > limit, limit, delta)
    return tl.where(delta < -limit, -limit, delta)


@triton.jit
def _update_block(
    sums,
    entry,
    cell,
    steps,
    count,
    width,
    given,
    sign,
    first,
    left,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    KEPT: tl.constexpr,
    MEAN: tl.constexpr,
    NOISE_P: tl.constexpr,
    NOISE_S: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    T: tl.constexpr = tl.float64 if P == tl.float64 else tl.float32  # noqa: SIM300
    g_at = _begin(entry, GRAD, count, first, G, WIDE)
    m_at = _begin(entry, M, count, first, S, WIDE)
    v_at = _begin(entry, V, count, first, S, WIDE)
    theta_at = _begin(entry, THETA, count, first, P, WIDE)
    g = _read(g_at, left, WIDE, BLOCK) * sign.to(T)
    m = _read(m_at, left, WIDE, BLOCK)
    v = _read(v_at, left, WIDE, BLOCK)
    theta = _read(theta_at, left, WIDE, BLOCK)
    if NOISE_P or NOISE_S:
        noise = _noise(steps, entry, count, first, BLOCK)
    if MEAN:
        tl.store(sums + tl.program_id(0), _abs_sum(theta, BLOCK))

    # m ← β1·m + c1·g,  v ← β2·v + c2·g²
    c1 = _coefficient(cell, given, C1, width, 0)
    c2 = _coefficient(cell, given, C2, width, 0)
    m = (1 - c1).to(T) * m + c1.to(T) * g
    v = (1 - c2).to(T) * v + c2.to(T) * (g * g)
    _write(m_at, _rounded(m, noise & 0xFFFF) if NOISE_S else m, left, WIDE, BLOCK)
    _write(v_at, _rounded(v, noise >> 16) if NOISE_S else v, left, WIDE, BLOCK)
    v_hat = v
    if KEPT:
        # v̂ = v_max ← max(leak·v_max, v)
        max_at = _begin(entry, V_MAX, count, first, S, WIDE)
        old = _coefficient(cell, given, LEAK, width, 1).to(T) * _read(max_at, left, WIDE, BLOCK)
        v_hat = tl.where(old > v, old, v)
        _write(max_at, _rounded(v_hat, noise >> 16) if NOISE_S else v_hat, left, WIDE, BLOCK)
    # θ ← θ - (fade·θ + Δ)
    rate = _coefficient(cell, given, RATE, width, 0).to(T)
    floor = _coefficient(cell, given, FLOOR, width, 0).to(T)
    limit = _coefficient(cell, given, LIMIT, width, float("inf")).to(T)
    fade = _coefficient(cell, given, FADE, width, 0).to(T)
    faded = tl.where(fade != 0, fade * theta, 0.0)  # 0·∞ would be NaN
    theta -= faded + _delta(m, v_hat, rate, floor, limit)
    _write(theta_at, _rounded(theta, _mixed(noise ^ 0x9E3779B9) & 0xFFFF) if NOISE_P else theta, left, WIDE, BLOCK)


@triton.jit(do_not_specialize=["count", "width", "given", "sign"])
def update(
    sums,
    table,
    tensors,
    cells,
    steps,
    count,
    width,
    given,
    sign,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    KEPT: tl.constexpr,
    MEAN: tl.constexpr,
    NOISE_P: tl.constexpr,
    NOISE_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The update of `rule.Coefficients`, one block of one tensor a program.

    P, G and S are the dtypes of θ, of g and of m, v and v_max; KEPT: there is a v_max; MEAN: Σ |θ| goes into `sums`;
    NOISE_P and NOISE_S: θ or the state is rounded to bfloat16 with noise; `sign` is -1 to maximize.
    """
    entry = table + tl.load(tensors + tl.program_id(0))
    first = (tl.program_id(0) - tl.load(entry + FIRST_BLOCK * count)) * BLOCK
    left = tl.load(entry + SIZE * count) - first
    cell = cells + tl.load(entry + COLUMN * count)
    if _coefficient(cell, given, MOVES, width, 1) != 0:
        if (tl.load(entry + ALIGNED * count) == 1) & (left >= BLOCK):
            _update_block(
                sums, entry, cell, steps, count, width, given, sign, first, left,
                P, G, S, KEPT, MEAN, NOISE_P, NOISE_S, True, BLOCK,
            )  # fmt: skip
        else:
            _update_block(
                sums, entry, cell, steps, count, width, given, sign, first, left,
                P, G, S, KEPT, MEAN, NOISE_P, NOISE_S, False, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "width", "given", "share"])
def correct(
    abs_sums,
    table,
    tensors,
    cells,
    count,
    width,
    given,
    share,
    P: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move θ from where `update` put it, with a floor for ⟨|θ|⟩ ≤ 1, to where it belongs, where ⟨|θ|⟩ is larger.

    With share = tiny_denom/(ε + tiny_denom), ε + tiny_denom·⟨|θ|⟩ is (ε + tiny_denom)·(1 + share·(⟨|θ|⟩ - 1)).
    """
    entry = table + tl.load(tensors + tl.program_id(0))
    column = tl.load(entry + COLUMN * count)
    cell = cells + column
    size = tl.load(entry + SIZE * count)
    mean = tl.load(abs_sums + column) / size.to(tl.float64)
    stays = (_coefficient(cell, given, MOVES, width, 1) == 0) | (mean <= 1)
    if not stays:
        first = (tl.program_id(0) - tl.load(entry + FIRST_BLOCK * count)) * BLOCK
        left = size - first
        theta_at = _begin(entry, THETA, count, first, P, False)
        m = _read(_begin(entry, M, count, first, P, False), left, False, BLOCK)
        v_hat = _read(_begin(entry, V_MAX if KEPT else V, count, first, P, False), left, False, BLOCK)
        rate = _coefficient(cell, given, RATE, width, 0).to(P)
        used = _coefficient(cell, given, FLOOR, width, 0)
        floor = used * (1 + share * (mean - 1))
        limit = _coefficient(cell, given, LIMIT, width, float("inf")).to(P)
        moved = _delta(m, v_hat, rate, used.to(P), limit) - _delta(m, v_hat, rate, floor.to(P), limit)
        _write(theta_at, _read(theta_at, left, False, BLOCK) + moved, left, False, BLOCK)


@triton.jit(do_not_specialize=["start", "n"])
def note(
    table, start, n,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    a8: tl.int64, a9: tl.int64, a10: tl.int64, a11: tl.int64,
    a12: tl.int64, a13: tl.int64, a14: tl.int64, a15: tl.int64,
):  # fmt: skip
    """Write the first `n` of these addresses into a table, at `start` and on."""
    addresses = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15)
    for i in tl.static_range(16):
        tl.store(table + start + i, addresses[i], mask=i < n)
