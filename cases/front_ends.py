"""Apply a model's front end, which is what it does to raw projections before attention, as a case id names it.

    train/f32/B2.T40.S72.N4.K2.H32.V32/causal-o32/front-rms-half-temperature/normal/s0

Steps are joined by `-` and applied in that order to q and to k, except `prescale` and `temperature`, which apply to q
only.

    rms          x / sqrt(mean(x^2) + 1e-6) * w, one learned w [H] for q and one for k (arXiv:1910.07467)
    l2           the same without weights
    half         rotary (arXiv:2104.09864), dimension d rotates with d + H/2
    interleaved  rotary, dimension 2d rotates with 2d + 1
    partial      `half`, applied to the first half of the dimensions
    decoupled    `half`, applied to the last third of the dimensions; all heads of k share this third, which is that of
                 the first head (multi-head latent attention, arXiv:2405.04434)
    sections     `half`, with three position streams: a quarter of the pairs rotates by the first, the rest by the other
                 two in equal parts (multi-section rotary, arXiv:2409.12191)
    prescale     q * 1.5, a model's own factor before attention
    temperature  q * (1 + log(1 + floor((position + 1) / 16)) / 2), as long-context models scale by position
    shared       v is the raw projection of k

Queries stand at the last `T` of `max(T, S)` positions, so that the last query and the last key have the same position.
"""

from __future__ import annotations

import dataclasses

import numpy as np

STEPS = ("rms", "l2", "half", "interleaved", "partial", "sections", "decoupled", "prescale", "temperature", "shared")
QUERIES_ONLY = ("prescale", "temperature")
SHARE = "share"
"""The part of `decoupled` that applies to keys only; no case id names it."""
EPSILON = 1e-6
BASE = 10_000.0
PRE_SCALE = 1.5
TEMPERATURE_FLOOR, TEMPERATURE_SCALE = 16, 0.5


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The pairs of dimensions that a rotary step rotates. The arrays have one entry for each pair, `[P]`.

    Pair `p` rotates by the angle `position * frequency[p]`, with the position from stream `streams[p]`.

    Attributes:
      frequency: angle per position, float64.
    """

    first: np.ndarray
    second: np.ndarray
    streams: np.ndarray
    frequency: np.ndarray


@dataclasses.dataclass(frozen=True)
class Raw:
    """Raw projections in the operands' dtype, and the weights of the norms in f32; None without such weights."""

    q: np.ndarray  # [B, T, N, H]
    k: np.ndarray  # [B, S, K, H]
    v: np.ndarray | None  # [B, S, K, V]; None if v is the raw projection of k
    q_norm: np.ndarray | None = None  # [H]
    k_norm: np.ndarray | None = None  # [H]


def parse_front_end(text: str, head_dim: int, v_head_dim: int) -> tuple[str, ...]:
    """Parse a front end's name into steps. Raises `ValueError` if one is unknown, repeated or unfit for the depths."""
    steps = tuple(text.split("-"))
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"{step!r} in front end {text!r} is none of {', '.join(STEPS)}")
    if len(set(steps)) < len(steps):
        raise ValueError(f"front end {text!r} has a step twice")
    if any(step in ("half", "interleaved", "partial", "sections") for step in steps) and head_dim % 8:
        raise ValueError(f"front end {text!r} rotates dimension pairs, so H must be a multiple of 8, got {head_dim}")
    if "decoupled" in steps and head_dim % 6:
        raise ValueError(
            f"front end {text!r} rotates pairs in the last third of H, so H must be a multiple of 6, got {head_dim}"
        )
    if "shared" in steps and head_dim != v_head_dim:
        raise ValueError(f"front end {text!r} shares k and v, so V must equal H, got {v_head_dim} and {head_dim}")
    return steps


def compute_positions(q_length: int, kv_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute int32 positions `[3, T]` and `[3, S]`: place in the sequence, and row and column as if in an image."""

    def compute_streams(start: int, length: int) -> np.ndarray:
        """Compute the three streams of `length` positions."""
        place = np.arange(start, start + length)
        return np.stack([place, place // 4, place % 4 * 8]).astype(np.int32)

    longest = max(q_length, kv_length)
    return compute_streams(longest - q_length, q_length), compute_streams(longest - kv_length, kv_length)


def build_rotation(step: str, head_dim: int) -> Rotation:
    """Build the dimension pairs and frequencies of a rotary step."""
    turned = {"partial": head_dim // 2, "decoupled": head_dim // 3}.get(step, head_dim)
    pair = np.arange(turned // 2)
    start = head_dim - turned if step == "decoupled" else 0
    streams = np.zeros(len(pair), int)
    if step == "sections":
        quarter = len(pair) // 4
        streams = np.where(pair < quarter, 0, 1 + (pair - quarter >= (len(pair) - quarter) // 2))
    first, second = (2 * pair, 2 * pair + 1) if step == "interleaved" else (start + pair, start + pair + len(pair))
    return Rotation(first, second, streams, BASE ** (-2.0 * pair / turned))


def compute_temperature(place: np.ndarray) -> np.ndarray:
    """Compute the factor of queries at these positions."""
    return 1 + TEMPERATURE_SCALE * np.log1p((place + 1) // TEMPERATURE_FLOOR)


def list_key_steps(steps: tuple[str, ...]) -> tuple[str, ...]:
    """List the steps that apply to keys. `decoupled` becomes two: share a third among heads (`SHARE`), then rotate."""
    kept = [step for step in steps if step not in QUERIES_ONLY]
    return tuple(part for step in kept for part in ((SHARE, step) if step == "decoupled" else (step,)))


def slice_last_third(head_dim: int) -> slice:
    """Return the slice of dimensions that `decoupled` rotates."""
    return slice(head_dim - head_dim // 3, head_dim)


def apply_front_end(steps: tuple[str, ...], raw: Raw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply the steps to raw projections, and return q, k and v in float64."""
    at_q, at_kv = compute_positions(raw.q.shape[1], raw.k.shape[1])
    q = _apply_steps(steps, raw.q.astype(np.float64), at_q, raw.q_norm)
    k = _apply_steps(list_key_steps(steps), raw.k.astype(np.float64), at_kv, raw.k_norm)
    return q, k, (raw.k if raw.v is None else raw.v).astype(np.float64)


def _apply_steps(steps: tuple[str, ...], x: np.ndarray, at: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    """Apply the steps to `x [B, L, heads, H]`, at position streams `[3, L]`."""
    for step in steps:
        if step in ("rms", "l2"):
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON)
            x = x * norm if step == "rms" and norm is not None else x
        elif step == "prescale":
            x = x * PRE_SCALE
        elif step == "temperature":
            x = x * compute_temperature(at[0])[:, None, None]
        elif step == SHARE:
            x = x.copy()
            x[..., slice_last_third(x.shape[-1])] = x[:, :, :1, slice_last_third(x.shape[-1])]
        elif step != "shared":
            turn = build_rotation(step, x.shape[-1])
            angle = (at[turn.streams].T * turn.frequency)[:, None, :]  # [L, 1, P]
            a, b = x[..., turn.first], x[..., turn.second]
            x = x.copy()
            x[..., turn.first] = a * np.cos(angle) - b * np.sin(angle)
            x[..., turn.second] = b * np.cos(angle) + a * np.sin(angle)
    return x
