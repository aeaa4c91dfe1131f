"""What travels between user 0 and a peer: requests, replies, and plain data as one run of bytes.

Both ends take nothing on trust. What does not fit is refused by the peer, and left out by user 0.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from coterie.engines.engine import AllRows, LocalWork
from coterie.errors import CoterieError, printable
from coterie.gradients.parameters import Parameters, is_finite
from coterie.mixture.answers import EStep
from coterie.mixture.posterior import Priors
from coterie.mixture.scaling import Scaling
from coterie.trees.histograms import Histograms

MAX_STEP = 2**62
"""The steps that can be asked for end here, far beyond any run."""

MAX_STREAMED = 2**20
"""How many new examples a stream may be asked for at once."""

MAX_POINTS = 16
"""At how many points one request may ask for gradients."""

MAX_LOCAL_STEPS = 1024
"""How many steps of its own a peer takes for one request."""

MOST_NOISE_TOLD = 1e30
"""A peer that tells of more noise than this is not believed: its square would be no number."""

MOST_REFUSED = 150
"""How many characters of why a peer refuses are shown."""

ARRAY = "array"
"""In the text of a letter, the one entry of what stands for an array.

Its type, its shape, and where it begins.
"""
_HEAD = 8
_ALIGNED = 64
_KINDS = "fiub"
_OF_SCALING = Scaling._fields[:-1]
_BITS: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16}
"""A type that NumPy does not have travels as whole numbers of as many bits."""
_TYPES = {np.dtype(str(bits).removeprefix("torch.")): kind for kind, bits in _BITS.items()}
_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


class RefusedError(CoterieError):
    """Why a peer does not answer. Its text leaves the peer, and tells of no example."""


@dataclass(frozen=True, eq=False)
class Request:
    """What user 0 asks of a peer.

    The gradient at each of some points, all on the batch of (seed, user, step).

    With `work`, the peer takes steps of its own from each point, and gives its displacement over
    their size. With `e_step` it answers that.
    """

    points: Tensor  # of shape (P, d)
    step: int
    seed: int
    batch_size: int  # all examples where the peer has fewer
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """User 0's, where the peer's model may have others: a row for each point, or one for all."""
    frozen: str | None = None  # `frozen_digest` of user 0's model; not compared when None
    # steps from each point, on the batches of this step and those after it
    work: LocalWork | None = None
    e_step: AllRows | None = None  # on all examples, the layers before it at the point

    @property
    def gradients(self) -> int:
        """How many gradients are behind the answer, all of which count."""
        if self.e_step is not None:
            return self.e_step.gradients
        return len(self.points) * (1 if self.work is None else self.work.count)

    def at(self, wanted: Sequence[bool]) -> Self:
        """Return the same request at some of the points alone."""
        places, n = [place for place, yes in enumerate(wanted) if yes], len(self.points)
        buffers = {
            name: rows[places] if len(rows) == n else rows for name, rows in self.buffers.items()
        }
        work = None if self.work is None else self.work.at(places)
        return replace(self, points=self.points[places], buffers=buffers, work=work)

    def message(self, points: Tensor | None = None) -> dict[str, Any]:
        """Return it as plain data and arrays, with `points`, which may be rounded, for its own."""
        work, e_step = self.work, self.e_step
        plain = vars(self) | {
            "points": encoded(self.points if points is None else points),
            "buffers": {name: to_array(buffer) for name, buffer in self.buffers.items()},
        }
        del plain["work"], plain["e_step"]
        if work is not None:
            plain["work"] = vars(work) | {"add": None if work.add is None else encoded(work.add)}
        if isinstance(e_step, Histograms):
            plain["e_step"] = e_step.message()
        elif e_step is not None:
            told = {name: getattr(e_step, name) for name in ("told", "family", "layer", "examples")}
            plain["e_step"] = told | e_step.priors._asdict() | e_step.scaling._asdict()
        return plain

    @classmethod
    def read(cls, message: Any, parameters: Parameters) -> Self:
        """Return the request in a message, its numbers as they come; a `RefusedError` where it is none."""
        whole = dict.fromkeys(("step", "seed", "batch_size"), int)
        numbers = _entries(message, whole, "step, seed and batch size must be whole numbers")
        sent, buffers = decoded(message.get("points")), message.get("buffers", {})
        points = None if sent is None else sent.to(parameters.device, parameters.dtype)
        if points is None or not is_finite(points):
            raise RefusedError(f"a point must be {parameters.size} finite floating-point numbers")
        if not isinstance(buffers, dict) or not all(
            isinstance(b, np.ndarray) and b.dtype.kind in _KINDS for b in buffers.values()
        ):
            raise RefusedError("buffers must be arrays by name")
        frozen, work, e_step = (message.get(name) for name in ("frozen", "work", "e_step"))
        return cls(
            points,
            **numbers,
            buffers={name: torch.from_numpy(np.array(buffer)) for name, buffer in buffers.items()},
            frozen=None if frozen is None else str(frozen),
            work=None if work is None else _read_work(work, parameters),
            e_step=None if e_step is None else read_e_step(e_step),
        )

    def check(self, model: nn.Module, size: int, *, streamed: bool) -> None:
        """Raise a `RefusedError` where it does not fit a model of `size` trained parameters."""
        points = self.points
        if points.ndim != 2 or not len(points) or points.shape[1] != size:
            raise RefusedError(f"a point must be {size} finite floating-point numbers")
        if len(points) > MAX_POINTS:
            raise RefusedError(f"it answers at {MAX_POINTS} points at most")
        sizes = 0 <= self.step < MAX_STEP, self.batch_size >= 1, -(2**63) <= self.seed < 2**64
        if not all(sizes):
            raise RefusedError("step, seed and batch size must be whole numbers")
        if streamed and self.batch_size > MAX_STREAMED:
            raise RefusedError(f"it draws {MAX_STREAMED} examples at most")
        if self.work is not None:
            self._check_work(self.work)
        if self.e_step is not None:
            if self.work is not None or len(points) > 1:
                raise RefusedError("an E-step has one point, and no other work")
            if wrong := self.e_step.wrong():
                raise RefusedError(wrong)
        ours = dict(model.named_buffers()) if self.buffers else {}
        for name, rows in self.buffers.items():
            if name not in ours or rows.shape[1:] != ours[name].shape or rows.ndim == 0:
                raise RefusedError("its model has other buffers")
            if len(rows) not in (1, len(points)):
                raise RefusedError("its model has other buffers")

    def _check_work(self, work: LocalWork) -> None:
        if not 1 <= work.count <= MAX_LOCAL_STEPS:
            raise RefusedError(f"it takes 1 to {MAX_LOCAL_STEPS} steps of its own")
        most = torch.finfo(self.points.dtype).max
        if not (0 < work.lr < most and 0 <= work.decay < most):
            raise RefusedError("step size and decay must be finite numbers, not below 0")
        if work.add is not None and not (
            work.add.shape == self.points.shape and is_finite(work.add)
        ):
            raise RefusedError("what is added must be finite numbers like the points")


def _entries(message: Any, kinds: Mapping[str, type], why: str) -> dict[str, Any]:
    """Return entries of a message, each of its type; a `RefusedError` that says why where one is not."""
    fields = message if isinstance(message, dict) else {}
    held = {name: fields.get(name) for name in kinds}
    if any(type(held[name]) is not kind for name, kind in kinds.items()):
        raise RefusedError(why)
    return held


def _read_work(message: Any, parameters: Parameters) -> LocalWork:
    kinds = {"count": int, "lr": float, "decay": float}
    numbers = _entries(
        message, kinds, "steps of its own must have a count, a step size and a decay"
    )
    add, row = message.get("add"), decoded(message.get("add"))
    if add is not None and row is None:
        raise RefusedError("what is added must be finite numbers like the points")
    return LocalWork(
        **numbers, add=None if row is None else row.to(parameters.device, parameters.dtype)
    )


def read_e_step(message: Any) -> AllRows:
    """Return what a message asks of all rows, its numbers as they come; a `RefusedError` where nothing."""
    if isinstance(message, dict) and str(message.get("told")) == Histograms.told:
        histograms = Histograms.of_message(message)
        if isinstance(histograms, str):
            raise RefusedError(histograms)
        return histograms
    kinds: dict[str, type] = dict.fromkeys(("family", "told", "layer"), str)
    kinds |= dict.fromkeys((*Priors._fields, *_OF_SCALING), np.ndarray)
    kinds |= {"examples": float, "intercept": bool}
    why = "an E-step must have priors, a scaling, and what to tell"
    held = _entries(message, kinds, why)
    for name, value in held.items():
        if isinstance(value, np.ndarray):
            if value.dtype != np.float64:
                raise RefusedError(why)
            held[name] = np.array(value)
        elif isinstance(value, str) and len(value) >= 1000:
            raise RefusedError(why)
    priors = Priors(*(held[name] for name in Priors._fields))
    scaling = Scaling(**{name: held[name] for name in Scaling._fields})
    of_answer = (held[name] for name in ("told", "examples", "layer"))
    return EStep(held["family"], scaling, priors, *of_answer)


def encoded(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an array to send.

    Example:
        >>> encoded(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype('int16')
    """
    plain = tensor.detach().cpu()
    return np.array((plain.view(_BITS[plain.dtype]) if plain.dtype in _BITS else plain).numpy())


def decoded(array: Any) -> Tensor | None:
    """Return the numbers of an array that was sent; None where it is not one of floating-point numbers.

    They are where they came, and not to be changed, unless torch cannot read them there.
    """
    if not isinstance(array, np.ndarray) or array.dtype not in (*_FLOATS, *_TYPES):
        return None
    plain = array if array.flags.c_contiguous and array.flags.behaved else np.array(array)
    numbers = torch.from_numpy(plain)
    return numbers.view(_TYPES[plain.dtype]) if plain.dtype in _TYPES else numbers


def message_bytes(message: Mapping[str, Any]) -> int:
    """Return how many bytes the arrays of a message have.

    Example:
        >>> message_bytes({"points": np.zeros(2), "work": {"add": np.zeros(1)}, "step": 3})
        24
    """
    sizes = (
        message_bytes(part) if isinstance(part, dict) else getattr(part, "nbytes", 0)
        for part in message.values()
    )
    return sum(sizes)


def to_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor as an array that can be sent."""
    plain = tensor.detach().cpu()
    # NumPy has no bfloat16
    return np.array((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())


# Replies, and what they tell.


@dataclass(frozen=True, eq=False)
class Reply:
    """What a peer answers: a gradient for each point, clipped, or why all are refused."""

    gradients: Tensor | None = None  # of shape (P, d), or of the request's `form`
    refused: str | None = None
    seconds: float = 0.0
    examples: int | None = None  # about how many the peer has; None for a stream
    noise: float | None = None  # the standard deviation of what a private peer added to each number


NO_ANSWER = "no answer"
"""Why a site is left out that has not answered."""


def read_array(
    name: str, reply: Any, kind: str, shape: Sequence[int], **numbers: int
) -> np.ndarray[Any, Any] | str:
    """Return the array of this kind, "gradients" or "part", that a site answers; or why there is none.

    `numbers` are those of the request, which the reply repeats.
    """
    if reply is None:
        return NO_ANSWER
    fields = reply if isinstance(reply, dict) else {}
    array, site, refused = fields.get(kind), fields.get("site"), fields.get("refused")
    if isinstance(refused, str):
        return "refused: " + printable(refused, MOST_REFUSED)
    if not isinstance(array, np.ndarray):
        return "not an array"
    same = (type(fields.get(each)) is int and fields[each] == n for each, n in numbers.items())
    wrong = {
        "from another sender": not isinstance(site, str) or site != name,
        "of another step": not all(same),
        f"shape {array.shape} instead of {tuple(shape)}": array.shape != tuple(shape),
    }
    return next((reason for reason, is_so in wrong.items() if is_so), array)


def promise_told(reported: Any) -> dict[str, float] | None:
    """Return what a peer says it promises and has spent of it, where that can be true.

    Example:
        >>> promise_told({"epsilon": 4.0, "delta": 1e-5, "clip": 1.0, "spent": 0.5, "more": "words"})
        {'epsilon': 4.0, 'delta': 1e-05, 'clip': 1.0, 'spent': 0.5}
        >>> promise_told({"epsilon": 4.0, "delta": -1.0, "clip": 1.0, "spent": 0.5}) is None
        True
    """
    fields = reported if isinstance(reported, dict) else {}
    told = {name: fields.get(name) for name in ("epsilon", "delta", "clip", "spent")}
    fine = all(isinstance(value, float) and 0 <= value < math.inf for value in told.values())
    return (
        {name: float(value) for name, value in told.items() if value is not None} if fine else None
    )


def whole_number(reported: Any, least: int = 1) -> int | None:
    """Return a number that a peer tells, such as of its examples, where it can be one.

    Example:
        >>> whole_number(40), whole_number(0), whole_number("a stream"), whole_number(10**5000)
        (40, None, None, None)
    """
    return reported if type(reported) is int and least <= reported < 2**53 else None


def size_told(reported: Any, most: float = MOST_NOISE_TOLD) -> float:
    """Return a size that a peer tells, of its noise or its seconds; 0 where it can be none.

    Example:
        >>> size_told(0.5), size_told(1e300), size_told("much"), size_told(11.0, most=10.0)
        (0.5, 0.0, 0.0, 0.0)
    """
    return reported if isinstance(reported, float) and 0 <= reported <= most else 0.0


# Letters: plain data and arrays as one run of bytes. Nothing in them is code.


def packed(content: Any) -> Tensor:
    """Return a letter, of bytes.

    The length of its text, the text, and the arrays, each where it can be read.

    Example:
        >>> letter = packed({"step": 3, "points": np.eye(2, dtype=np.float32)})
        >>> unpacked(letter)["points"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_written(content, arrays)).encode()
    text += b" " * (-(_HEAD + len(text)) % _ALIGNED)
    end = _HEAD + len(text)
    letter = torch.empty(end + _length(arrays), dtype=torch.uint8)
    data = letter.numpy()
    data[:end] = np.frombuffer(len(text).to_bytes(_HEAD, "little") + text, dtype=np.uint8)
    for array in arrays:
        np.ndarray(array.shape, array.dtype, data, end)[...] = array
        data[end + array.nbytes : end + _length([array])] = 0
        end += _length([array])
    return letter


def unpacked(letter: Tensor) -> Any:
    """Return what is in a letter; `ValueError` where it is none."""
    data = letter.numpy().data
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    if not _HEAD <= end <= len(data):
        raise ValueError("the text of a letter is longer than the letter")
    try:
        return _read(json.loads(bytes(data[_HEAD:end])), data[end:])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a letter: {type(error).__name__}") from error


def to_bytes(content: Any) -> bytes:
    """Return a letter as bytes, as most transports carry it.

    Example:
        >>> from_bytes(to_bytes({"step": 3}))
        {'step': 3}
    """
    return packed(content).numpy().tobytes()


def from_bytes(data: bytes) -> Any:
    """Return what is in a letter that came as bytes; `ValueError` where it is none."""
    return unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _length(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    """Return how many bytes arrays take, filled up so that the next begins where it can be read."""
    return sum(array.nbytes + -array.nbytes % _ALIGNED for array in arrays)


def _written(content: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Return the content with each array, which is put aside, replaced by its description."""
    if isinstance(content, np.ndarray):
        begin = _length(arrays)
        arrays.append(content)
        return {ARRAY: [content.dtype.str, list(content.shape), begin]}
    if isinstance(content, dict):
        return {name: _written(value, arrays) for name, value in content.items()}
    return content


def _read(content: Any, data: memoryview) -> Any:
    if not isinstance(content, dict):
        return content
    if set(content) != {ARRAY}:
        return {name: _read(value, data) for name, value in content.items()}
    kind, shape, begin = content[ARRAY]
    dtype = np.dtype(str(kind))
    whole = all(type(number) is int and number >= 0 for number in [*shape, begin])
    if (
        dtype.kind not in _KINDS
        or not whole
        or begin + math.prod(shape) * dtype.itemsize > len(data)
    ):
        raise ValueError("a letter describes an array that it does not hold")
    return np.ndarray(tuple(shape), dtype, data, begin)
