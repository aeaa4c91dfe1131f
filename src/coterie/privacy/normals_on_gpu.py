"""Normal numbers made on a GPU from ChaCha20's stream: what `randomness.normals_of` gives for the same key."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.privacy.randomness import CHUNK

BLOCKS = CHUNK // 16
"""So many blocks of ChaCha20, of eight numbers each, are the radii of a chunk; as many after them its angles."""

LANES = 128
"""How many blocks one program makes at a time."""


def normals_of(key: bytes, n: int, device: torch.device) -> Tensor:
    """Return n standard normal numbers in double precision on this device."""
    chunks = -(-n // CHUNK)
    words = [word - 2**32 if word >= 2**31 else word for word in struct.unpack("<8I", key)]
    given = torch.empty(chunks * CHUNK, dtype=torch.float64, device=device)
    with torch.cuda.device(device):
        _box_muller[(chunks * BLOCKS // LANES,)](
            given, torch.tensor(words, dtype=torch.int32, device=device), CHUNK, BLOCKS, LANES
        )
    return given[:n]


@triton.jit
def _rotated(x, n: tl.constexpr):
    return (x << n) | (x >> (32 - n))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _fraction(low, high):
    """Return two words as a number in (0, 1], a multiple of 2⁻⁵³."""
    whole = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)) >> 11
    return (whole.to(tl.int64) + 1).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _eight(keys, counter):
    """Return the eight numbers of the block with this counter."""
    zero = counter ^ counter
    k0 = zero + tl.load(keys).to(tl.uint32, bitcast=True)
    k1 = zero + tl.load(keys + 1).to(tl.uint32, bitcast=True)
    k2 = zero + tl.load(keys + 2).to(tl.uint32, bitcast=True)
    k3 = zero + tl.load(keys + 3).to(tl.uint32, bitcast=True)
    k4 = zero + tl.load(keys + 4).to(tl.uint32, bitcast=True)
    k5 = zero + tl.load(keys + 5).to(tl.uint32, bitcast=True)
    k6 = zero + tl.load(keys + 6).to(tl.uint32, bitcast=True)
    k7 = zero + tl.load(keys + 7).to(tl.uint32, bitcast=True)
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    a0, a1, a2, a3 = c0, c1, c2, c3
    b0, b1, b2, b3, b4, b5, b6, b7 = k0, k1, k2, k3, k4, k5, k6, k7
    d0, d1, d2, d3 = counter, zero, zero, zero
    for _ in range(10):
        a0, b0, b4, d0 = _quarter(a0, b0, b4, d0)
        a1, b1, b5, d1 = _quarter(a1, b1, b5, d1)
        a2, b2, b6, d2 = _quarter(a2, b2, b6, d2)
        a3, b3, b7, d3 = _quarter(a3, b3, b7, d3)
        a0, b1, b6, d3 = _quarter(a0, b1, b6, d3)
        a1, b2, b7, d0 = _quarter(a1, b2, b7, d0)
        a2, b3, b4, d1 = _quarter(a2, b3, b4, d1)
        a3, b0, b5, d2 = _quarter(a3, b0, b5, d2)
    return (
        _fraction(a0 + c0, a1 + c1),
        _fraction(a2 + c2, a3 + c3),
        _fraction(b0 + k0, b1 + k1),
        _fraction(b2 + k2, b3 + k3),
        _fraction(b4 + k4, b5 + k5),
        _fraction(b6 + k6, b7 + k7),
        _fraction(d0 + counter, d1),
        _fraction(d2, d3),
    )


@triton.jit
def _write(given, place, half, radius, angle):
    radius = tl.sqrt(-2.0 * tl.log(radius))
    angle = tl.full(angle.shape, 6.283185307179586, tl.float64) * angle  # a plain number may lose digits
    tl.store(given + place, radius * tl.cos(angle))
    tl.store(given + place + half, radius * tl.sin(angle))


@triton.jit
def _box_muller(given, keys, chunk: tl.constexpr, blocks: tl.constexpr, lanes: tl.constexpr):
    block = tl.program_id(0) * lanes + tl.arange(0, lanes)
    counter = ((block // blocks) * 2 * blocks + block % blocks).to(tl.uint32)
    r0, r1, r2, r3, r4, r5, r6, r7 = _eight(keys, counter)
    t0, t1, t2, t3, t4, t5, t6, t7 = _eight(keys, counter + blocks)
    place = (block // blocks).to(tl.int64) * chunk + 8 * (block % blocks)
    half: tl.constexpr = chunk // 2
    _write(given, place, half, r0, t0)
    _write(given, place + 1, half, r1, t1)
    _write(given, place + 2, half, r2, t2)
    _write(given, place + 3, half, r3, t3)
    _write(given, place + 4, half, r4, t4)
    _write(given, place + 5, half, r5, t5)
    _write(given, place + 6, half, r6, t6)
    _write(given, place + 7, half, r7, t7)
