"""Sites that all train, in threads of this process: what carries their messages is a function call."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd

import coterie
from coterie.engines.messages import from_bytes
from coterie.errors import PeerLost
from coterie.federation import kits
from coterie.federation.manifest import CERTIFICATES
from coterie.federation.member import MemberRun
from coterie.federation.participants import LOG, lead_participant
from coterie.federation.provisioning import Consortium
from coterie.federation.settings import Data, LeadSettings, Model, Training, site_settings

NAMES = ("basel", "bern", "chur")


def patients(n: int, seed: int) -> pd.DataFrame:
    """Return patients whose illness depends on age, in each hospital a little otherwise."""
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 10, n)
    ill = age + 3 * seed * (rng.random(n) - 0.5) + rng.normal(0, 8, n) > 50
    return pd.DataFrame({"age": age, "sex": rng.choice(["f", "m"], n), "ill": ill.astype(int)})


def set_up(folder: Path, training: Training) -> None:
    """Write the folders of a consortium in which everyone trains, without the cost of certificates."""
    folder.mkdir()
    tables = {
        name: patients(n, seed)
        for seed, (name, n) in enumerate(zip(NAMES, (50, 60, 40), strict=True))
    }
    tables[NAMES[0]].to_csv(folder / "mine.csv", index=False)
    data = Data(table=str(folder / "mine.csv"), target="ill")
    settings = LeadSettings(NAMES[0], NAMES[1:], data, Model("linear"), training)
    with mock.patch.object(kits, "provision", without_certificates):
        prints = kits.set_up(
            folder, Consortium("trial", "localhost", NAMES, everyone=True), settings
        )
    for name in NAMES[1:]:
        kits.accept(folder / "sites" / name, prints[name])
        tables[name].to_csv(folder / "sites" / name / "data.csv", index=False)
    for seed, name in enumerate(NAMES):
        with_known_draws(folder / "sites" / name, seed)


def with_known_draws(kit: Path, seed: int) -> None:
    """Give a site the secret that its batches are drawn by: a test's numbers must not depend on chance."""
    path = kit / f"{LOG}.secret"
    path.touch(0o600)
    path.write_text(f"the secret of a site in a test, {seed}")


def without_certificates(consortium: Consortium, folder: Path, size: int) -> None:
    for site in consortium.sites:
        place = folder / "sites" / site
        place.mkdir(parents=True)
        for name in CERTIFICATES:
            (place / name).write_text(name)


def change(folder: Path, names: Sequence[str], **settings: str) -> None:
    """Set settings of sites anew."""
    for name in names:
        path = folder / "sites" / name / "coterie.toml"
        lines = path.read_text().splitlines()
        heads = [line.partition(" = ")[0] for line in lines]
        for knob, value in settings.items():
            lines[heads.index(knob)] = f"{knob} = {value}"
        path.write_text("\n".join(lines))


def copied(folder: Path, to: Path) -> Path:
    """Copy a consortium, with the secrets by which its sites draw."""
    return Path(shutil.copytree(folder, to))


def everyone_in_process(folder: Path, names: Sequence[str]) -> coterie.Runs:
    """Train everyone in this process by adaptive averaging, with the examples of a consortium's sites."""
    settings = {name: site_settings(folder / "sites" / name).as_lead() for name in names}
    held = [lead_participant(folder / "sites" / name, each)[0] for name, each in settings.items()]
    how = settings[names[0]].training
    knobs = {name: getattr(how, name) for name in ("steps", "lr", "batch_size", "seed")}
    users = [each.user for each in held]
    return coterie.train_everyone(
        held[0].model, held[0].loss, users, coterie.AdaptiveAveraging(), **knobs
    )


@dataclass
class Answers:
    """What was asked of sites, each in a thread of its own."""

    futures: Mapping[str, Future[Any]]
    timeout: float

    def done(self) -> bool:
        """Say whether all have answered."""
        return all(each.done() for each in self.futures.values())

    def wait(self) -> Mapping[str, Any]:
        """Return the answers that have come in time."""
        wait(self.futures.values(), timeout=self.timeout)
        return {
            name: each.result()
            for name, each in self.futures.items()
            if each.done() and not each.exception()
        }


@dataclass
class Job:
    """One job with the sites that are in it.

    Args:
        folder: the consortium's.
        names: the sites.
        silent: says of a site and a step whether it does not answer there.
        lost_at: the step at which no site finds the server any more.
    """

    folder: Path
    names: Sequence[str] = NAMES
    silent: Callable[[str, int], bool] = lambda name, step: False
    lost_at: float = math.inf
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def __post_init__(self) -> None:
        self.members = {name: MemberRun(self.folder / "sites" / name) for name in self.names}

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Answers:
        """Ask sites as the server does; see `Sites.ask`."""
        return self.asked_by("server", names, method, timeout, arguments)

    def asked_by(
        self,
        caller: str,
        names: Sequence[str],
        method: str,
        timeout: float,
        arguments: Mapping[str, Any],
    ) -> Answers:
        """Ask sites."""
        step = max((self._step(caller, name, arguments) for name in names), default=0)
        if step >= self.lost_at:
            raise PeerLost("the server does not answer")
        here = [name for name in names if name in self.members and not self.silent(name, step)]
        futures = {
            name: self.pool.submit(self._call, caller, name, method, arguments) for name in here
        }
        return Answers(futures, timeout)

    def _step(self, caller: str, name: str, arguments: Mapping[str, Any]) -> int:
        """Return the step that a sealed call is of, which nobody but the one it is for can know."""
        if "call" not in arguments or name not in self.members:
            return 0
        call, calls = arguments["call"], self.members[name].calls
        assert calls is not None
        content = calls._opened(
            caller, (caller, name, "call"), call["number"], call["sealed"].tobytes()
        )
        request = from_bytes(content)["arguments"].get("request")
        return int(request["step"]) if request else 0

    def _call(self, caller: str, name: str, method: str, arguments: Mapping[str, Any]) -> Any:
        one = self.members[name]
        if method == "call":
            return one.answer(**arguments)
        assert caller == "server"
        carried = [FromASite(self, name)] if method in ("check", "train") else []
        return getattr(one, method)(*carried, **arguments)


@dataclass(frozen=True)
class FromASite:
    """The sites, as one of them asks."""

    job: Job
    name: str

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Answers:
        """Ask them; see `Sites.ask`."""
        return self.job.asked_by(self.name, names, method, timeout, arguments)
