# mypy: disable-error-code="no-untyped-def"
"""One Triton kernel for every change of flat CUDA tensors; `triton_kernels` launches it.

The same numbers as `torch_reference`, to the last bit: uint32, int32 or single float32 operations, each
rounded on its own (the launch forbids contraction). A launch reads a coordinate once, writes it once,
allocates nothing of parameter size and does not wait for the device.

Only primitives of the language are used (no `tl.zeros`, `tl.cdiv`, ...), so that under
TRITON_INTERPRET=1 the same code runs, slowly, on CPU tensors, whether or not that was set when Triton
itself was first imported.

A program owns 4096 coordinates of the index space, 128 rows of 32 lanes. Word w of 32 neighbouring
Philox calls, one for each lane, serves row 4 g + w (normals: call g * 32 + lane) or row 32 w + g
(signs: bit g). Either way the four words belong to four blocks of 32 rows, so a program holds four
accumulators [32 rows, 32 lanes], and memory is read and written by whole rows of 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(32)
GROUP = tl.constexpr(32)
"""Rows that one word of a program's calls serves."""
ROWS = tl.constexpr(128)
"""Rows that a program owns: as many as one Philox call gives sign bits."""

_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_WEYL0, _WEYL1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_DITHER_STEP = tl.constexpr(0x9E3779B9)
_SIGN = tl.constexpr(0x80000000)
_NORMAL_UNIT = tl.constexpr(2.0**-21)
_UNIFORM_UNIT = tl.constexpr(2.0**-24)
_INTEGERS_FROM = tl.constexpr(2.0**23)
_BITS_OF_INTEGERS_FROM = tl.constexpr(0x4B000000)
_LEAST_NORMAL_HALF = tl.constexpr(2.0**-14)
_LARGEST_HALF = tl.constexpr(65504.0)

PART_FIELDS = tl.constexpr(6)
ALIGNMENT = tl.constexpr(16)

BFLOAT16, FLOAT16 = tl.constexpr(1), tl.constexpr(2)
"""Values of `ROUND`; 0 for float32, where nothing is rounded."""

# A launch's integers vary freely: none may be compiled in because it happens to be 1.
_FREE = ["terms", "members", "count", "first_tile", "lead"]
_FREE += ["key0", "key1", "key2", "key3", "field0", "field1", "field2", "field3", "field4", "after"]


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    """One Philox round; a product is one widening multiplication of 32 by 32 bits."""
    first = c0.to(tl.uint64) * _M0
    second = c2.to(tl.uint64) * _M1
    high0 = (first >> 32).to(tl.uint32)
    high1 = (second >> 32).to(tl.uint32)
    return high1 ^ c1 ^ k0, second.to(tl.uint32), high0 ^ c3 ^ k1, first.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10: four uint32 words for each counter; blocks and scalars may be mixed."""
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + _WEYL0
        k1 = k1 + _WEYL1
    return c0, c1, c2, c3


@triton.jit
def _words(tile, n0, n1, k0, k1, GAUSSIAN: tl.constexpr):
    """The four words of a program's calls: uint32 [32, 32] for normals, [1, 32] for signs."""
    lane = tl.arange(0, LANES)[None, :]
    if GAUSSIAN:
        call = tile * (GROUP * LANES)
        inside = tl.arange(0, GROUP)[:, None] * LANES + lane
    else:
        call = tile * LANES
        inside = lane
    low = call.to(tl.uint32) + inside.to(tl.uint32)  # call is a multiple: no carry
    high = (call >> 32).to(tl.uint32)
    return _philox(low, high, n0, n1, k0, k1)


@triton.jit
def _rows_of(word: tl.constexpr, GAUSSIAN: tl.constexpr):
    """The program's rows that a word serves, int32 [32, 1]."""
    group = tl.arange(0, GROUP)[:, None]
    if GAUSSIAN:
        return group * 4 + word
    else:
        return group + word * GROUP


@triton.jit
def _places(word: tl.constexpr, GAUSSIAN: tl.constexpr):
    """The program's coordinates that a word serves, int32 [32, 32]."""
    return _rows_of(word, GAUSSIAN) * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _valid(word: tl.constexpr, begin, end, GAUSSIAN: tl.constexpr, EVEN: tl.constexpr):
    """Which of them are the tensor's: [32, 1] if it has whole rows only, else [32, 32]."""
    if EVEN:
        place = _rows_of(word, GAUSSIAN) * LANES
    else:
        place = _places(word, GAUSSIAN)
    return (place >= begin) & (place < end)


@triton.jit
def _members_of(rows, column, first_row, begin, end, word: tl.constexpr, GAUSSIAN: tl.constexpr):
    """The member that each row belongs to, int32 [32, 1]; `column` where all belong to one."""
    if rows is None:
        return column
    else:
        row = _rows_of(word, GAUSSIAN)
        inside = (row * LANES >= begin) & (row * LANES < end)
        return tl.load(rows + first_row + row, mask=inside, other=0)


@triton.jit
def _field(table, inline, number: tl.constexpr, t, terms, members, member):
    """One number of term t and of each row's member, as int32 bits: an argument or from the table."""
    if table is None:
        return inline
    else:
        return tl.load(table + 4 * terms + (number * terms + t) * members + member)


@triton.jit
def _key(table, inline, number: tl.constexpr, t):
    if table is None:
        return inline.to(tl.uint32, bitcast=True)
    else:
        return tl.load(table + 4 * t + number).to(tl.uint32, bitcast=True)


@triton.jit
def _signed(amount, words, GAUSSIAN: tl.constexpr):
    """+amount where the row's bit of the word is set, else -amount."""
    shift = 31 - tl.arange(0, GROUP)[:, None]
    bit = (words << shift.to(tl.uint32)) & _SIGN
    return ((amount.to(tl.uint32, bitcast=True) ^ _SIGN) ^ bit).to(tl.float32, bitcast=True)


@triton.jit
def _normal(words, normals):
    """z of each word, in units of 2^-21; `normals` holds center << 32 | half, so one load has both."""
    s = (words & 255) + ((words >> 8) & 255) + ((words >> 16) & 255)
    b = ((words >> 24) & 127).to(tl.int32)
    both = tl.load(normals + s.to(tl.int32))
    center = (both >> 32).to(tl.int32)
    return center + (2 * b - 127) * both.to(tl.int32)


@triton.jit
def _rint(x):
    """Round half to even; where float32 has no fractions left, x. The sign of a zero is free."""
    magic = (x.to(tl.uint32, bitcast=True) & _SIGN) | _BITS_OF_INTEGERS_FROM
    magic = magic.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < _INTEGERS_FROM, (x + magic) - magic, x)


@triton.jit
def _floor(x):
    """The largest integer not above x. `tl.floor` would flush subnormals to zero first."""
    nearest = _rint(x)
    return tl.where(nearest > x, nearest - 1.0, nearest)


@triton.jit
def _dither(start, starts, member, first, word: tl.constexpr, GAUSSIAN: tl.constexpr):
    """start + j * step mod 2^32 for the coordinates' indices j in their own tensor, uint32 [32, 32].

    first: of the program, in the (larger) tensor.
    """
    index = _places(word, GAUSSIAN).to(tl.uint32) + first.to(tl.uint32)
    if starts is not None:
        index = index - tl.load(starts + member).to(tl.uint32)
    return start.to(tl.uint32, bitcast=True) + index * _DITHER_STEP


@triton.jit
def _load(
    source, first, begin, end,
    word: tl.constexpr, GAUSSIAN: tl.constexpr, ROUND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The source's values, float32 [32, 32]."""
    where = _valid(word, begin, end, GAUSSIAN, EVEN)
    values = tl.load(source + first + _places(word, GAUSSIAN), mask=where, other=0)
    if ROUND == BFLOAT16:  # its bits, as int16
        return _of_bfloat16(values)
    else:
        return values.to(tl.float32)


@triton.jit
def _update_steps(z, update, dither):
    """z * update in whole steps, rounded stochastically: floor(step) + floor(fraction + uniform)."""
    step = z * update
    below = _floor(step)
    uniform = (dither >> 8).to(tl.int32).to(tl.float32) * _UNIFORM_UNIT
    lifted = (step - below) + uniform  # in [0, 2]: the fraction of a tiny negative step rounds to 1
    return below + ((lifted >= 1.0).to(tl.float32) + (lifted >= 2.0).to(tl.float32))


@triton.jit
def _add(
    acc, words, normals, table, rows, starts, column, t, terms, members, first_row, shift, begin, end,
    field0, field1, field2, field3, field4,
    word: tl.constexpr, GAUSSIAN: tl.constexpr, GRID: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """acc + one term, for the 32 rows that a word serves."""
    member = _members_of(rows, column, first_row, begin, end, word, GAUSSIAN)
    amount = _field(table, field0, 0, t, terms, members, member).to(tl.float32, bitcast=True)
    if not GAUSSIAN:
        return acc + _signed(amount, words, GAUSSIAN)
    else:
        z = _normal(words, normals).to(tl.float32) * _NORMAL_UNIT
        if not GRID:
            return acc + z * amount
        else:
            old = _field(table, field1, 1, t, terms, members, member).to(tl.float32, bitcast=True)
            steps = (_rint(z * amount) - _rint(z * old)) + 0.0
            if UPDATE:
                update = _field(table, field2, 2, t, terms, members, member)
                start = _field(table, field4, 4, t, terms, members, member)
                dither = _dither(start, starts, member, first_row * LANES + shift, word, GAUSSIAN)
                steps += _update_steps(z, update.to(tl.float32, bitcast=True), dither)
            spacing = _field(table, field3, 3, t, terms, members, member)
            return acc + steps * spacing.to(tl.float32, bitcast=True)


@triton.jit
def _decayed(
    acc, table, rows, starts, column, terms, members, first_row, shift, begin, end,
    word: tl.constexpr, GAUSSIAN: tl.constexpr, ROUND: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """acc after weight decay, rounded stochastically to what a tensor can hold."""
    member = _members_of(rows, column, first_row, begin, end, word, GAUSSIAN)
    rate = _field(table, 0, DECAY, 0, terms, members, member).to(tl.float32, bitcast=True)
    start = _field(table, 0, DECAY + 2, 0, terms, members, member)
    dither = _dither(start, starts, member, first_row * LANES + shift, word, GAUSSIAN)
    if ROUND == 0:
        spacing = _field(table, 0, DECAY + 1, 0, terms, members, member)
        return acc + _update_steps(acc, rate, dither) * spacing.to(tl.float32, bitcast=True)
    elif ROUND == BFLOAT16:
        return _of_bfloat16(_round_bfloat16(acc - acc * rate, dither))
    else:
        return _round_float16(acc - acc * rate, dither).to(tl.float32)


@triton.jit
def _of_bfloat16(bits):
    """The float32 of a bfloat16's bits, given as int16."""
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round_bfloat16(acc, dither):
    """Stochastically rounded: the bits of a bfloat16, as int16."""
    bits = acc.to(tl.uint32, bitcast=True) + (dither >> 16)
    return (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _round_float16(acc, dither):
    """Stochastically rounded to float16, saturated; below 2^-14 on its grid of subnormals."""
    size = tl.abs(acc)
    small = size < _LEAST_NORMAL_HALF
    lifted = tl.where(small, size + _LEAST_NORMAL_HALF, size)
    bits = (lifted.to(tl.uint32, bitcast=True) + (dither >> 19)) & 0xFFFFE000
    cut = bits.to(tl.float32, bitcast=True)
    cut = tl.where(small, cut - _LEAST_NORMAL_HALF, cut)
    cut = tl.where(cut > _LARGEST_HALF, _LARGEST_HALF, cut)
    signed = cut.to(tl.uint32, bitcast=True) | (acc.to(tl.uint32, bitcast=True) & _SIGN)
    return signed.to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def _store(
    out, acc, table, rows, starts, column, terms, members, first_row, shift, begin, end, field1,
    word: tl.constexpr, GAUSSIAN: tl.constexpr, ROUND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Writes the tensor's share of a block, rounded to its precision."""
    if ROUND != 0:
        member = _members_of(rows, column, first_row, begin, end, word, GAUSSIAN)
        start = _field(table, field1, 1, 0, terms, members, member)
        dither = _dither(start, starts, member, first_row * LANES + shift, word, GAUSSIAN)
        acc = _round_bfloat16(acc, dither) if ROUND == BFLOAT16 else _round_float16(acc, dither)
    where = _valid(word, begin, end, GAUSSIAN, EVEN)
    tl.store(out + first_row * LANES + _places(word, GAUSSIAN), acc, mask=where)


@triton.jit
def _square(words, normals, first, begin, end, word: tl.constexpr):
    """z^2 of the coordinates that a word serves, int64 [32, 32], in units of 2^-42; 0 outside."""
    z, place = _normal(words, normals).to(tl.int64), first + _places(word, True)
    return tl.where((place >= begin) & (place < end), z * z, 0)


@triton.jit(do_not_specialize=["first_tile", "tiles", "begin", "end", *_FREE[5:9]])
def squares(sums, normals, first_tile, tiles, begin, end, key0, key1, key2, key3):
    """sums int64 [programs, 1024]: of the squares of normals begin .. end, counted from first_tile on.

    Exact where a program has at most 2^13 of the tiles: a square is below 2^47.
    """
    k0, k1 = _key(None, key0, 0, 0), _key(None, key1, 1, 0)
    n0, n1 = _key(None, key2, 2, 0), _key(None, key3, 3, 0)
    tile, slot = tl.program_id(0).to(tl.int64), _places(0, False)
    own, total = tile * (GROUP * LANES), (slot * 0).to(tl.int64)
    while tile < tiles:
        w0, w1, w2, w3 = _words(tile + first_tile, n0, n1, k0, k1, True)
        first = tile * (ROWS * LANES)
        total += _square(w0, normals, first, begin, end, 0)
        total += _square(w1, normals, first, begin, end, 1)
        total += _square(w2, normals, first, begin, end, 2)
        total += _square(w3, normals, first, begin, end, 3)
        tile += tl.num_programs(0)
    tl.store(sums + own + slot, total)


@triton.jit
def _address(number, ROUND: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the values of a tensor at an address, which the compiler may take to be aligned."""
    if ROUND == 0:
        pointer = number.to(tl.pointer_type(tl.float32))
    elif ROUND == BFLOAT16:
        pointer = number.to(tl.pointer_type(tl.int16))
    else:
        pointer = number.to(tl.pointer_type(tl.float16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, ALIGNMENT)
    return pointer


@triton.jit(do_not_specialize=_FREE)
def walk(
    out, source, table, rows, starts, pieces, parts, owners, normals,
    terms, members, count, first_tile, lead,
    key0, key1, key2, key3, field0, field1, field2, field3, field4, after,
    GAUSSIAN: tl.constexpr, GRID: tl.constexpr, UPDATE: tl.constexpr, DECAY: tl.constexpr,
    ROUND: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out = source + its terms, for 4096 coordinates: the program's tile, counted from first_tile.

    Args:
      out, source: float32, float16, or the bits of bfloat16 as int16.
      table: int32 bits [4 T + fields T M], the terms' keys [T, 4] and then their fields [T, M] one
        after another; None where T = M = 1: then key0.. and field0.. hold the same.
      rows, starts: int32 member of each row of 32 and int64 first element of each member, or None.
      pieces: None, or int64 [P]: the tensor is P equal parts of a larger one, which begin at these
        of its elements. Programs are then [P, tiles of a piece].
      parts, owners: None, or the tensors of one launch, int64 [P, 6], and the one that each program
        works on, int32: addresses of out and source, offset, elements, first program, member. `out`,
        `source`, `count`, `first_tile` and `lead` are not used then.
      normals: int64 [766] (see `_normal`); None for signs.
      terms, members: T, M.
      count: elements of the tensor, or of a piece.
      first_tile, lead: tile of the (larger) tensor's first element, and that tile's rows before it.
      after: the term before which weight decay is made.
      GAUSSIAN, GRID, UPDATE, DECAY, ROUND, EVEN, ALIGNED: which variant; the first of weight decay's
        fields, 0 without; whether every count is a multiple of 32, and every address in `parts` of 16.

    Fields: the amount and, if ROUND, the dither's start; if GRID new, old, update (in steps of the
    grid), the step, the dither's start. Then, if DECAY, its rate, the step, the dither's start.
    """
    column = 0
    if parts is not None:
        number = tl.program_id(0)
        entry = parts + tl.load(owners + number).to(tl.int64) * PART_FIELDS
        out = _address(tl.load(entry), ROUND, ALIGNED)
        source = _address(tl.load(entry + 1), ROUND, ALIGNED)
        row, count = tl.load(entry + 2) // LANES, tl.load(entry + 3)
        program, shift = number.to(tl.int64) - tl.load(entry + 4), 0
        column = tl.load(entry + 5).to(tl.int32)
        first_tile, lead = row // ROWS, row % ROWS
    elif pieces is None:
        program, shift = tl.program_id(0).to(tl.int64), 0
    else:
        piece, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        shift = tl.load(pieces + piece)
        row = first_tile.to(tl.int64) * ROWS + lead + shift // LANES
        first_tile, lead = row // ROWS, row % ROWS
        skipped = piece * (count // LANES) * LANES if EVEN else piece * count
        out += skipped
        source += skipped
    tile = program + first_tile
    first_row = program * ROWS - lead
    first = first_row * LANES
    begin = tl.maximum(-first, 0).to(tl.int32)
    end = tl.minimum(count - first, ROWS * LANES).to(tl.int32)
    a0 = _load(source, first, begin, end, 0, GAUSSIAN, ROUND, EVEN)
    a1 = _load(source, first, begin, end, 1, GAUSSIAN, ROUND, EVEN)
    a2 = _load(source, first, begin, end, 2, GAUSSIAN, ROUND, EVEN)
    a3 = _load(source, first, begin, end, 3, GAUSSIAN, ROUND, EVEN)
    t = 0
    while t < terms:  # the interpreters of older releases cannot count to a tensor
        if DECAY != 0:  # noqa: SIM102 - decided when compiled, then when run
            if t == after:
                a0 = _decayed(
                    a0, table, rows, starts, column, terms, members, first_row, shift, begin, end,
                    0, GAUSSIAN, ROUND, DECAY,
                )  # fmt: skip
                a1 = _decayed(
                    a1, table, rows, starts, column, terms, members, first_row, shift, begin, end,
                    1, GAUSSIAN, ROUND, DECAY,
                )  # fmt: skip
                a2 = _decayed(
                    a2, table, rows, starts, column, terms, members, first_row, shift, begin, end,
                    2, GAUSSIAN, ROUND, DECAY,
                )  # fmt: skip
                a3 = _decayed(
                    a3, table, rows, starts, column, terms, members, first_row, shift, begin, end,
                    3, GAUSSIAN, ROUND, DECAY,
                )  # fmt: skip
        k0, k1 = _key(table, key0, 0, t), _key(table, key1, 1, t)
        n0, n1 = _key(table, key2, 2, t), _key(table, key3, 3, t)
        w0, w1, w2, w3 = _words(tile, n0, n1, k0, k1, GAUSSIAN)
        a0 = _add(
            a0, w0, normals, table, rows, starts, column, t, terms, members, first_row, shift,
            begin, end,
            field0, field1, field2, field3, field4, 0, GAUSSIAN, GRID, UPDATE,
        )  # fmt: skip
        a1 = _add(
            a1, w1, normals, table, rows, starts, column, t, terms, members, first_row, shift,
            begin, end,
            field0, field1, field2, field3, field4, 1, GAUSSIAN, GRID, UPDATE,
        )  # fmt: skip
        a2 = _add(
            a2, w2, normals, table, rows, starts, column, t, terms, members, first_row, shift,
            begin, end,
            field0, field1, field2, field3, field4, 2, GAUSSIAN, GRID, UPDATE,
        )  # fmt: skip
        a3 = _add(
            a3, w3, normals, table, rows, starts, column, t, terms, members, first_row, shift,
            begin, end,
            field0, field1, field2, field3, field4, 3, GAUSSIAN, GRID, UPDATE,
        )  # fmt: skip
        t += 1
    _store(
        out, a0, table, rows, starts, column, terms, members, first_row, shift, begin, end, field1,
        0, GAUSSIAN, ROUND, EVEN,
    )  # fmt: skip
    _store(
        out, a1, table, rows, starts, column, terms, members, first_row, shift, begin, end, field1,
        1, GAUSSIAN, ROUND, EVEN,
    )  # fmt: skip
    _store(
        out, a2, table, rows, starts, column, terms, members, first_row, shift, begin, end, field1,
        2, GAUSSIAN, ROUND, EVEN,
    )  # fmt: skip
    _store(
        out, a3, table, rows, starts, column, terms, members, first_row, shift, begin, end, field1,
        3, GAUSSIAN, ROUND, EVEN,
    )  # fmt: skip
