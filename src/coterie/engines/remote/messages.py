"""Requests and replies as NVFLARE carries them: dictionaries of plain data and NumPy arrays.

Both ends take nothing on trust. What does not fit is refused by the site, and left out by user 0.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.engines.compression import decoded, encoded, relative_error
from coterie.engines.engine import AllRows, LocalWork
from coterie.engines.peer import Peer
from coterie.engines.requests import Request, to_array
from coterie.errors import printable
from coterie.gradients.gradients import is_finite
from coterie.gradients.parameters import Parameters
from coterie.mixture.answers import EStep
from coterie.mixture.posterior import Priors
from coterie.mixture.scaling import Scaling
from coterie.privacy.masks import N_CHECKS, NoiseShare, Words
from coterie.trees.histograms import Histograms

MAX_EXTRA_BYTES = 4096
"""How many bytes a message may have beside the gradients."""


def pack_request(request: Request, points: Tensor | None = None) -> dict[str, Any]:
    """Return a request as a message.

    With `points` in place of its own, which may be in half precision.
    """
    buffers = {name: to_array(buffer) for name, buffer in request.buffers.items()}
    sent = to_array(request.points) if points is None else encoded(points)
    message = vars(request) | {"points": sent, "buffers": buffers}
    work, e_step = message.pop("work"), message.pop("e_step")
    if isinstance(e_step, Histograms):
        message["e_step"] = e_step.message()
    elif e_step is not None:
        plain = {name: getattr(e_step, name) for name in ("told", "family", "layer", "examples")}
        message["e_step"] = plain | e_step.priors._asdict() | e_step.scaling._asdict()
    if work is not None:
        message["work"] = vars(work) | {"add": None if work.add is None else to_array(work.add)}
    return message


def request_bytes(message: dict[str, Any]) -> int:
    """Return how many bytes the arrays of a request have."""
    parts = [message["points"], *message["buffers"].values()]
    parts += [part for name in ("work", "e_step") for part in message.get(name, {}).values()]
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))


def answer_form(message: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return something like what is answered to a request of one's own."""
    e_step = _read_e_step(message.get("e_step"))
    points: np.ndarray[Any, Any] = message["points"]
    if isinstance(e_step, EStep | Histograms):
        return np.zeros((1, math.prod(e_step.shape)))
    return points


def answer_message(
    peer: Peer, caller: str, request: Any, share: NoiseShare | None = None, *, masked: bool = False
) -> dict[str, Any]:
    """Return a peer's reply to a message, as a message.

    For a masked sum, with a share of its noise.

    Of an error only its kind leaves the site: its text may hold what is in the data.
    """
    step = request.get("step") if isinstance(request, dict) else None
    try:
        read = _read_request(peer, request)
        reply = (
            peer.refuse(read, caller, step)
            if isinstance(read, str)
            else peer.answer(read, caller, share, masked=masked)
        )
    except (
        Exception
    ) as error:  # whatever it is, user 0 is told that there is no gradient, and the log why
        return {"refused": f"it failed with {type(error).__name__}"}
    if reply.gradients is None:
        return {"refused": reply.refused}
    gradients, asked_as, rounding = reply.gradients, decoded(request["points"]), 0.0
    # in half precision a share of noise could be rounded away
    if asked_as is not None and share is None and "e_step" not in request:
        exact = gradients
        gradients = peer.rounded(exact, asked_as.dtype, caller)
        rounding = relative_error(exact, gradients)
    about = {
        "site": peer.user.name,
        "step": step,
        "seconds": reply.seconds,
        "examples": reply.examples,
    }
    about |= {} if reply.noise is None else {"noise": reply.noise}
    # under masks it would tell of the gradient
    about |= {"rounding": rounding} if rounding and not masked else {}
    return {"gradients": encoded(gradients), **about}


def read_reply(name: str, reply: Any, step: int, points: Tensor) -> Tensor | str | None:
    """Return the gradients in a reply, like `points`, None where there is no reply, or what is wrong with it.

    They may not be finite.
    """
    if reply is None:
        return None
    fields = reply if isinstance(reply, dict) else {}
    sent, refused = fields.get("gradients"), fields.get("refused")
    if isinstance(refused, str):
        return "refused: " + printable(refused, 100)
    if not isinstance(sent, np.ndarray):
        return "not a gradient"
    gradients = decoded(sent)
    wrong = {
        "from another sender": not isinstance(fields.get("site"), str) or fields["site"] != name,
        "of another step": _is_other(fields.get("step"), step),
        "too large": sent.nbytes > points.numel() * 8 + MAX_EXTRA_BYTES,
        "not of floating-point numbers": gradients is None,
        f"shape {sent.shape} instead of {tuple(points.shape)}": sent.shape != tuple(points.shape),
    }
    reasons = [reason for reason, is_so in wrong.items() if is_so]
    return reasons[0] if reasons or gradients is None else gradients.to(points)


def read_part(name: str, reply: Any, step: int, round_: int, size: int) -> Words | str:
    """Return a site's masked part of a sum of `size` numbers, or why there is none."""
    fields = reply if isinstance(reply, dict) else {}
    part, refused = fields.get("part"), fields.get("refused")
    if isinstance(refused, str):
        return "refused: " + printable(refused, 150)
    wrong = {
        "no answer": reply is None,
        "not a masked part": not isinstance(part, np.ndarray) or part.dtype != np.uint32,
        "from another sender": not isinstance(fields.get("site"), str) or fields["site"] != name,
        "of another step": (
            _is_other(fields.get("step"), step) or _is_other(fields.get("round"), round_)
        ),
    }
    reasons = [reason for reason, is_so in wrong.items() if is_so]
    if reasons or not isinstance(part, np.ndarray):
        return reasons[0]
    if part.shape == (size + N_CHECKS,):
        return part
    return f"shape {part.shape} instead of {(size + N_CHECKS,)}"


def _is_other(number: Any, expected: int) -> bool:
    return not isinstance(number, int) or number != expected


def _read_request(peer: Peer, message: Any) -> Request | str:
    """Return the request in a message, for this peer's model, or what is wrong with it."""
    if not isinstance(message, dict):
        return "a request must have fields"
    sent, parameters = decoded(message.get("points")), peer.passes.parameters
    points = None if sent is None else sent.to(parameters.device, parameters.dtype)
    if points is None or not is_finite(points):
        return f"a point must be {parameters.size} finite floating-point numbers"
    work = _read_work(message.get("work"), parameters)
    e_step = _read_e_step(message.get("e_step"))
    if isinstance(work, str) or isinstance(e_step, str):
        return work if isinstance(work, str) else str(e_step)
    numbers: dict[str, Any] = {name: message.get(name) for name in ("step", "seed", "batch_size")}
    buffers, frozen = message.get("buffers", {}), message.get("frozen")
    if not all(isinstance(number, int) for number in numbers.values()):
        return "step, seed and batch size must be whole numbers"
    if not isinstance(buffers, dict) or not all(
        isinstance(b, np.ndarray) and b.dtype.kind in "fiub" for b in buffers.values()
    ):
        return "buffers must be arrays by name"
    return Request(
        points,
        **numbers,
        buffers={name: torch.from_numpy(np.array(buffer)) for name, buffer in buffers.items()},
        frozen=None if frozen is None else str(frozen),
        work=work,
        e_step=e_step,
    )


def _read_work(message: Any, parameters: Parameters) -> LocalWork | str | None:
    """Return the steps that a message asks for, None where it asks for none, or what is wrong with them."""
    if message is None:
        return None
    fields = message if isinstance(message, dict) else {}
    count, lr, decay, add = (fields.get(name) for name in ("count", "lr", "decay", "add"))
    if type(count) is not int or type(lr) is not float or type(decay) is not float:
        return "steps of its own must have a count, a step size and a decay"
    row = None if add is None else decoded(add)
    if add is not None and (row is None or not bool(row.isfinite().all())):
        return "what is added must be finite numbers like the points"
    row = None if row is None else row.to(parameters.device, parameters.dtype)
    return LocalWork(count, lr, row, decay)


def _read_e_step(message: Any) -> AllRows | str | None:
    """Return what a message asks of all rows, its numbers as they come, or what is wrong with it."""
    if message is None:
        return None
    fields = message if isinstance(message, dict) else {}
    if str(fields.get("told")) == Histograms.told:
        return Histograms.of_message(fields)
    texts = [fields.get(name) for name in ("family", "told", "layer")]
    of_scaling = Scaling._fields[:-1]
    arrays = {name: fields.get(name) for name in (*Priors._fields, *of_scaling)}
    examples, intercept = fields.get("examples"), fields.get("intercept")
    if (
        not all(type(text) is str and len(text) < 1000 for text in texts)
        or not all(isinstance(a, np.ndarray) and a.dtype == np.float64 for a in arrays.values())
        or type(examples) is not float
        or type(intercept) is not bool
    ):
        return "an E-step must have priors, a scaling, and what to tell"
    held: dict[str, Any] = {name: np.array(array) for name, array in arrays.items()}
    family, told, layer = (str(text) for text in texts)
    priors = Priors(*(held[name] for name in Priors._fields))
    scaling = Scaling(**{name: held[name] for name in of_scaling}, intercept=intercept)
    return EStep(family, scaling, priors, told, examples, layer)
