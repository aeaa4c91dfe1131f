"""User 0's run: the ordinary training, with sites for peers."""

import functools
import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from coterie.choosing import TellsGradients, chooser_for
from coterie.data.table import TableTask
from coterie.engines.engine import MakeEngine
from coterie.engines.messages import whole_number
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import Sites
from coterie.errors import CoterieError, KnobError, PeerLost, printable
from coterie.federation.live import LivePage
from coterie.federation.participants import Participant, lead_participant
from coterie.federation.settings import FILE, MIXTURE, LeadSettings, MessageSettings, lead_settings
from coterie.methods import build
from coterie.methods.elsewhere import gradients_asked
from coterie.methods.rounds import Method
from coterie.recording import files
from coterie.recording.checkpoint import saved, step_of
from coterie.recording.claim import claimed
from coterie.recording.configuration import StepSettings
from coterie.recording.record import Record
from coterie.registry import RunSizes
from coterie.tables.fit import fit
from coterie.tables.models import save_model
from coterie.training.algorithm import Followed, algorithm_of
from coterie.training.train import train

RUN = "run"
SECONDS_FOR_THE_LAST_ONE = 60.0
"""How long to wait for another process that trains here.

One whose server was killed may need a moment to end.
"""
NEWS = "news.log"
"""What happened on the way: sites that were dropped or taken back."""
SUMMARY = "summary.txt"
"""The result in a few lines; written last, so that what has one has ended."""
REFUSED = "refused.txt"
"""Why a run was not begun, or cannot go on."""
RECORD = "record.jsonl"
"""The record of a run, in its folder."""
BEGUN_ANEW = "beginning anew: the run had ended before a step was saved"
SECONDS_OF_LATENCY = 10.0
"""How long a run of a network may wait for messages to arrive, if asking more rarely prevents it."""
RAREST = {"adaptive": 8, "wga": 4}
"""How rarely a rule may ask without loss, as measured: docs/exchanges.md."""
REMEDY = f"Take fewer steps or larger batches, leave it out of `sites` ({FILE}), or agree on other "
REMEDY += "[caps] or [sums]"


def lead(folder: Path, sites: Sites) -> None:
    """Train, or go on training, with the settings in user 0's folder.

    All results go to `run` in it.
    """
    settings, out = lead_settings(folder), folder / RUN
    torch.set_num_threads(settings.threads)
    with at_work(out):
        try:
            if not (out / RECORD).exists():
                check_plan(settings, sites)
            train_here(settings, sites, out, *lead_participant(folder, settings))
        except PeerLost:  # another job can go on
            raise
        except CoterieError as error:  # another job would fail as well
            files.write(out / REFUSED, str(error).encode())
            raise


@contextmanager
def at_work(out: Path) -> Iterator[None]:
    """Claim the folder of a run, forget how the last one ended, and write what coterie has to say to its news."""
    out.mkdir(parents=True, exist_ok=True)
    with claimed(out, SECONDS_FOR_THE_LAST_ONE), _news(out / NEWS):
        for name in (SUMMARY, REFUSED):
            (out / name).unlink(missing_ok=True)
        yield


def train_here(
    settings: LeadSettings, sites: Sites, out: Path, held: Participant, task: TableTask | None
) -> None:
    """Train a model for who holds these examples, with sites for peers, and write all results to a folder."""
    settings = paced(settings, sites, out)
    if (out / RECORD).exists():
        there = [step_of(path) for path in saved(out / "checkpoints")]
        said = f"going on from step {there[-1]}" if there else BEGUN_ANEW
        logging.getLogger(__name__).warning(said)
    rule, knobs = rule_of(settings), settings.training
    page = LivePage(out, sites, settings.sites, knobs.timeout, out / NEWS)
    options: dict[str, Any] = {n.name: getattr(knobs, n.name) for n in fields(StepSettings)}
    options |= {"engine": _engine_of(settings, sites, page), "hooks": [page]}
    options |= {"resume": True, "progress": False}
    if task is not None:
        fitted = fit(task, rule, settings.model.name, out, **options)
        said = "stopped" if fitted is None else fitted.summary()
    else:
        run = train(held.model, held.loss, held.user, (), rule, out=out, **options)
        about = settings.model
        save_model(out, run.model, about.name, about.n_inputs or 0, about.n_outputs or 0)
        said = run.summary()
    files.write(out / SUMMARY, f"{said}\n".encode())


def _engine_of(settings: LeadSettings, sites: Sites, page: LivePage) -> MakeEngine:
    """Return what makes the engine: one that sees each site's gradient, or their sum alone."""
    knobs = settings.training
    messages = {each.name: getattr(knobs, each.name) for each in fields(MessageSettings)}

    asking = functools.partial(Remote, sites=sites, names=settings.sites, **messages)

    def made(*args: Any, **how: Any) -> Remote:
        engine = asking(*args, **how)
        page.engine = engine
        return engine

    return made


def paced(settings: LeadSettings, sites: Sites, out: Path) -> LeadSettings:
    """Return the settings of a network with how often its sites are asked, by how soon they answer.

    So rarely that the latency of all messages is at most `SECONDS_OF_LATENCY`; `exchange_every` at
    most `rarest`. A run that goes on keeps what it began with.
    """
    training = settings.training
    most = min(training.rarest, RAREST.get(training.rule, 1))
    if training.exchange_every > 1 or most == 1 or settings.model.name == "linear":
        return settings
    if (out / RECORD).exists():
        every = Record.load(out / RECORD).configuration.exchange_every
    else:
        asked, took = sites.ask(settings.sites, "ready", training.timeout).wait(), []
        for _ in range(3):
            began = time.monotonic()
            sites.ask(list(asked), "ready", training.timeout).wait()
            took.append(time.monotonic() - began)
        seconds = statistics.median(took)
        every = min(most, max(1, math.ceil(training.steps * seconds / SECONDS_OF_LATENCY)))
        if every > 1:
            said = "sites answer after %.0f ms: they are asked at one of %d steps (`rarest`)"
            logging.getLogger(__name__).warning(said, 1e3 * seconds, every)
    return replace(settings, training=replace(training, exchange_every=every))


def planned_gradients(settings: LeadSettings) -> int:
    """Return how many gradients a run may ask of each site, those that its knobs are chosen by among them."""
    training, rule = settings.training, rule_of(settings)
    return algorithm_of(rule).gradients_asked(settings.me, settings.sites, training)


def check_plan(settings: LeadSettings, sites: Sites) -> None:
    """Refuse a run that a site would not answer to its end, before its first step.

    What is silent is not asked.
    """
    if problems := problems_with(settings, sites):
        raise KnobError(f"{'; '.join(problems)}. {REMEDY}")


def problems_with(settings: LeadSettings, sites: Sites, askers: int = 1) -> list[str]:
    """Return why sites would not answer a run to its end, by what they say themselves.

    `askers` ask as much.
    """
    wanted, size = askers * planned_gradients(settings), settings.training.batch_size
    plan = {"batch_size": size, "gradients": wanted}
    replies = sites.ask(settings.sites, "ready", settings.training.timeout, **plan).wait()
    problems = []
    whose = "this run" if askers == 1 else f"{askers} sites"
    for name in settings.sites:
        terms = reply if isinstance(reply := replies.get(name), dict) else {}
        numbers = (terms.get(key) for key in ("left", "examples", "batch_size", "sums_of"))
        left, least, only, sums_of = (whole_number(number, 0) for number in numbers)
        no_e_steps = terms.get("no_e_steps")
        if settings.training.rule == MIXTURE:  # an E-step is of all examples
            least, only = (1 if terms.get("size") else least), None
            if terms and no_e_steps != "":
                why = f", {printable(no_e_steps, 100)}" if isinstance(no_e_steps, str) else ""
                problems.append(
                    f'{name} answers no E-steps{why}: name `rule = "adaptive"`, whose gradient'
                    " steps it can answer"
                )
        promised = terms.get("promises")
        if isinstance(promised, str):
            said = "%s promises %s; a run with it does not have the same bits again"
            logging.getLogger(__name__).warning(said, name, printable(promised))
        if only is not None and only != size:
            problems.append(
                f"{name} gives gradients of batches of {only} only, and `batch_size` is {size}"
            )
        elif left is not None and left < wanted:
            problems.append(f"{name} gives {left} more gradients, and {whose} may ask for {wanted}")
        if least is not None and least > size:
            problems.append(
                f"{name} gives no gradient of fewer than {least} rows, and `batch_size` is {size}"
            )
        elif terms.get("size") == 0:
            problems.append(f"{name} gives no gradient of fewer than {least} rows, and has fewer")
        if sums_of is not None and not settings.training.secure_sums:
            problems.append(f"{name} gives masked sums only, and `secure_sums` is not set")
        elif sums_of is not None and sums_of > (n := _n_summed_with(name, settings, replies)):
            said = f"{name} gives sums of {sums_of} sites or more"
            problems.append(f"{said} that give nothing but masked sums, and is in one of {n}")
    return problems


def rule_of(settings: LeadSettings) -> Followed:
    """Return the rule or method that the settings name.

    What sites hold is theirs to tell: no knob depends on it.

    A knob that is "auto" is chosen by gradients, which sites give.
    """
    training = settings.training
    knobs = {"alpha": training.alpha, "beta": training.beta} | dict(training.knobs)
    chosen = {name: value for name, value in knobs.items() if value is not None}
    sums = training.secure_sums
    peers = settings.sites if isinstance(sums, bool) else tuple(sums)
    facts = RunSizes(settings.data.own_examples or 0, dict.fromkeys(peers), training.steps)
    rule: Followed = build(training.rule, chosen, facts)
    algorithm = algorithm_of(rule)
    if training.rule == MIXTURE and settings.model.name != "linear":
        raise KnobError(
            f"`rule` {MIXTURE!r} finds linear models, and the model is {settings.model.name!r};"
            ' use "adaptive"'
        )
    if algorithm.counts == "rounds":
        _check_method(algorithm.followed, settings)
        return rule
    chooser = chooser_for(rule)
    if chooser is not None and not isinstance(chooser, TellsGradients):
        raise KnobError(
            f"`rule` {training.rule!r} does not say how many gradients it asks of each site before"
            " the first step, by which sites know whether they give them; let it have"
            " `gradients_before`"
        )
    if training.secure_sums is True and algorithm.needs_rows:
        why = ' to choose a knob that is "auto"' if chooser is not None else ""
        raise KnobError(
            f"`rule` {training.rule!r} needs each site's gradient{why}, and `secure_sums` gives"
            ' their sum alone; use "mixture" where the model is linear, "wga" or "bc" with numbers'
            " for their knobs, or name groups of sites in `secure_sums`"
        )
    return rule


def _check_method(method: Method, settings: LeadSettings) -> None:
    """Refuse a method that needs more of sites than gradients and local steps, or these in another way."""
    training, name = settings.training, settings.training.rule
    if max(training.exchange_every, training.local_steps) > 1:
        raise KnobError(
            f"`rule` {name!r} has rounds of its own: leave `exchange_every` and `local_steps` out,"
            " and give its own knobs, such as `--knob local_steps=5`"
        )
    if training.secure_sums:
        raise KnobError(
            f"`rule` {name!r} lets sites take steps of their own, which `secure_sums` does not"
            " mask; leave one out"
        )
    try:
        gradients_asked(method, settings.me, settings.sites)
    except KnobError as error:
        raise KnobError(f"`rule` {name!r} cannot be used with sites: {error}") from error


def _n_summed_with(name: str, settings: LeadSettings, replies: Mapping[str, Any]) -> int:
    """Return how many sites count in the masked sums that a site is in.

    All but who says that it gives more.
    """
    groups = settings.training.secure_sums
    here: Sequence[str] = settings.sites
    if not isinstance(groups, bool):
        here = next((g for g in groups.values() if name in g), ())
    terms = [replies.get(site) for site in here]
    return sum(not isinstance(each, dict) or "sums_of" in each for each in terms)


@contextmanager
def _news(path: Path) -> Iterator[None]:
    """Write what coterie has to say to a file, which `coterie federate run` shows."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("coterie")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
