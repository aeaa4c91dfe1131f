"""What peers say of themselves under torch.distributed, and whether they fit user 0 and each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.engines.requests import noise_told, promise_told
from coterie.engines.torch_distributed.wire import Wire
from coterie.errors import DataError, KnobError, ModelError, printable
from coterie.privacy.sums import SumsOnly
from coterie.users.user import check_names

HELLO: dict[str, Any] = {"name": str, "examples": int | str, "data": str, "size": int, "dtype": str}
HELLO |= {"sums_only": list | None, "refused": str | None}
"""The entries of a hello, and of which types they are."""

PROMISE = "promise"
"""What the note is called that a private peer leaves when the run has ended."""


def strictest(hellos: Sequence[Mapping[str, Any]]) -> SumsOnly | None:
    """Return sums that all peers take part in; None where none gives sums only."""
    kinds = [SumsOnly(*hello["sums_only"]) for hello in hellos if hello["sums_only"]]
    return SumsOnly(max(k.peers for k in kinds), min(k.share for k in kinds)) if kinds else None


def check_hellos(
    me: str,
    wire: Wire,
    hellos: Sequence[Mapping[str, Any]],
    expected: Sequence[str],
    *,
    gather: bool = False,
) -> None:
    """Refuse peers that do not fit user 0 or each other."""
    names = [hello["name"] for hello in hellos]
    for rank, hello in enumerate(hellos, 1):
        if hello["refused"]:
            said = printable(hello["refused"], 1000)
            raise ModelError(f"rank {rank} ({hello['name']!r}) cannot take part: {said}")
        theirs, ours = (hello["size"], hello["dtype"]), (wire.size, str(wire.dtype))
        if theirs != ours:
            raise ModelError(
                f"rank {rank} ({hello['name']!r}) has a model of {theirs[0]} parameters of"
                f" {theirs[1]}, user 0 one of {ours[0]} of {ours[1]}; build the same model in every"
                " process"
            )
        if not hello["name"].isprintable():
            raise DataError(
                f"rank {rank} has the name {hello['name'][:80]!r}; a name must be printable text"
            )
        if (hello["sums_only"] and len(hello["sums_only"]) != 2) or not hello["name"]:
            raise DataError(f"rank {rank} says of itself what cannot be: {printable(hello)}")
        if hello["sums_only"] and SumsOnly(*hello["sums_only"]).peers > len(hellos):
            raise KnobError(
                f"rank {rank} ({hello['name']!r}) gives sums of {hello['sums_only'][0]} peers or"
                f" more, and there are {len(hellos)}; start more, or agree on fewer (`--min-peers`)"
            )
    check_names([me, *names])
    if expected and sorted(expected) != sorted(names):
        raise DataError(f"expected the peers {', '.join(expected)}, but {', '.join(names)} came")
    if gather and strictest(hellos) is not None:
        raise KnobError(
            "`gather` collects every peer's gradient, but a peer gives sums only; leave it out"
        )


def promises_in(said: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what peers promise, where it can be true, with the noise on each number."""
    promises = {}
    for one in said:
        promise: Any = one.get("promise")
        if (told := promise_told(promise)) is not None:
            promises[one["name"]] = told | {"noise": noise_told(promise.get("noise"))}
    return promises
