"""Sites that ask each other through a server which cannot read, alter or make up what they say.

See `Calls`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.engines.remote.codec import packed, unpacked
from coterie.engines.remote.sites import Replies, Sites
from coterie.errors import MaskError
from coterie.privacy.calls import Calls
from coterie.recording import files

logger = logging.getLogger(__name__)

KNOWN_KEYS = "known_keys.json"
"""The fingerprints of other sites' keys as they were first seen, in a site's folder."""
FORGET = (
    "if that site has a new key, compare its fingerprint by telephone and take its entry out of"
)


class SealedSites:
    """Other sites, asked by sealed calls; who has no key in this job does not answer."""

    def __init__(self, sites: Sites, calls: Calls) -> None:
        self._sites, self._calls = sites, calls

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> "SealedReplies":
        """Ask sites; see `Sites.ask`."""
        content, sent = _as_bytes({"method": method, "arguments": arguments}), {}
        for name in filter(self._calls.knows, names):
            number, sealed = self._calls.call(name, content)
            call = {"by": self._calls.site, "number": number, "sealed": _as_array(sealed)}
            sent[name] = number, self._sites.ask([name], "call", timeout, call=call)
        return SealedReplies(sent, self._calls)


@dataclass(frozen=True)
class SealedReplies:
    """Replies to sealed calls: what does not open is no reply."""

    sent: Mapping[str, tuple[int, Replies]]
    calls: Calls

    def done(self) -> bool:
        """Say whether every site has answered, failed or run out of time."""
        return all(replies.done() for _, replies in self.sent.values())

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the replies by site."""
        found = {}
        for name, (number, replies) in self.sent.items():
            reply = replies.wait().get(name)
            if reply is None:
                continue
            try:
                found[name] = _content(self.calls.reply(name, number, _sealed_in(reply)))
            except (MaskError, ValueError) as error:
                logger.warning("%s: what came as its reply is left out: %s", name, error)
        return found


def answered(
    calls: Calls, call: Any, answer: Callable[[str, str, dict[str, Any]], Any]
) -> dict[str, Any]:
    """Return the sealed reply to a sealed call, by what answers (caller, method, arguments).

    What is not a call by a site that is known, or was there before, is a `MaskError`.
    """
    fields = call if isinstance(call, dict) else {}
    by, number = fields.get("by"), fields.get("number")
    if not isinstance(by, str) or type(number) is not int:
        raise MaskError("a call must be sealed by the site that calls")
    content = calls.take(by, number, _sealed_in(call))
    try:
        asked = _content(content)
        method, arguments = str(asked["method"]), dict(asked["arguments"])
    except (ValueError, TypeError, LookupError) as error:
        raise MaskError(f"a call by {by!r} names no method and arguments") from error
    return {"sealed": _as_array(calls.answer(by, number, _as_bytes(answer(by, method, arguments))))}


class KnownKeys:
    """The keys of other sites.

    Those that were compared, or each as it was first seen, as `ssh` does.

    Args:
        folder: the site's.
        compared: the fingerprints in its settings, of all sites; when empty, first sight decides.
    """

    def __init__(self, folder: Path, compared: Mapping[str, str]) -> None:
        self.path, self.compared = folder / KNOWN_KEYS, dict(compared)

    def __call__(self) -> dict[str, str]:
        """Return the fingerprints that are known."""
        if self.compared or not self.path.exists():
            return self.compared
        return {
            str(k): str(v) for k, v in files.read_json(self.path, f"{FORGET} {self.path}").items()
        }

    def add(self, found: Mapping[str, str]) -> None:
        """Remember keys that were seen for the first time."""
        known = self()
        if not self.compared and not found.keys() <= known.keys():
            files.write_json(self.path, {**found, **known})
            self.path.chmod(0o600)


def _as_bytes(content: Any) -> bytes:
    return packed(content).numpy().tobytes()


def _content(data: bytes) -> Any:
    return unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _as_array(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype=np.uint8)


def _sealed_in(message: Any) -> bytes:
    sealed = message.get("sealed") if isinstance(message, dict) else None
    if not isinstance(sealed, np.ndarray) or sealed.dtype != np.uint8 or sealed.ndim != 1:
        raise MaskError("it is not sealed")
    return sealed.tobytes()
