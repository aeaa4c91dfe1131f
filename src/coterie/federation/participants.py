"""A participant: its examples, its model and the loss, from its settings and its own code."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.data import Preparation, from_table, read_table
from coterie.data.columns import as_category, check_names
from coterie.data.table import TableTask
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.responder import Responder
from coterie.errors import DataError, KnobError, did_you_mean, few_of
from coterie.federation.settings import (
    FILE,
    MIXTURE,
    Data,
    LeadSettings,
    Model,
    SiteSettings,
    site_settings,
)
from coterie.tables import models
from coterie.users.sampling import one_thread
from coterie.users.user import Loss, User

LOG = "requests.jsonl"


@dataclass(frozen=True)
class Participant:
    """The examples, the model and the loss of user 0 or of a site."""

    user: User
    model: nn.Module
    loss: Loss


def peer_of(folder: Path) -> Peer:
    """Return a site's peer, from the settings in its folder and the preparation that user 0 gave out."""
    settings = site_settings(folder)
    torch.set_num_threads(settings.threads)
    if settings.training is None:
        return peer_with(folder, settings, site_participant(folder, settings))
    return peer_with(folder, settings, lead_participant(folder, settings.as_lead())[0])


def peer_with(folder: Path, settings: SiteSettings, held: Participant) -> Peer:
    """Return a site's peer with the examples and the model that it holds.

    It gives of training examples only.
    """
    passes, log = Passes(held.model, held.loss), folder / LOG
    return Peer(held.user, passes, settings.caps, log, privacy=settings.privacy)


def responder_of(folder: Path) -> Responder:
    """Return what answers at a site in a job."""
    return Responder(peer_of(folder), site_settings(folder).sums)


def site_participant(folder: Path, settings: SiteSettings) -> Participant:
    """Return what a site holds; rows of classes that user 0 does not know are left out."""
    if settings.data.loader:
        return _loaded(folder, settings.data, settings.model)
    preparation = Preparation.load(folder)
    rows = _known(_rows(folder, settings.data), settings.data, preparation)
    user = User(settings.name, *preparation.examples(rows, settings.data.target))
    return Participant(user, *_model(settings.model, preparation))


def lead_participant(folder: Path, settings: LeadSettings) -> tuple[Participant, TableTask | None]:
    """Return what user 0, or a site that trains, holds, and its task where the examples are a table's."""
    with one_thread(), torch.random.fork_rng(devices=[]):  # nobody else's draws are changed
        torch.manual_seed(settings.training.seed)
        if settings.data.loader:
            return _loaded(folder, settings.data, settings.model), None
        preparation = Preparation.load(folder)
        rows = _known(_rows(folder, settings.data), settings.data, preparation)
        task = lead_task(rows, settings, preparation, kind=preparation.kind)
        return Participant(task.me, *_model(settings.model, task.preparation)), task


def lead_task(
    rows: Any, settings: LeadSettings, preparation: Preparation | None = None, **options: Any
) -> TableTask:
    """Return user 0's rows as a task without peers, split into training, validation and test."""
    if settings.data.target not in rows.columns:
        raise DataError(
            f"{settings.data.table} has no column {settings.data.target!r} to predict; it has "
            f"{few_of(rows.columns)}{did_you_mean(settings.data.target, rows.columns)}"
        )
    column = "coterie: user"
    if settings.training.rule == MIXTURE:  # which judges by folds of the own rows
        options["validation"] = 0.0
    return from_table(
        rows.assign(**{column: settings.me}),
        user_column=column,
        target=settings.data.target,
        me=settings.me,
        own_examples=settings.data.own_examples,
        seed=settings.training.seed,
        preparation=preparation,
        **options,
    )


def _rows(folder: Path, data: Data) -> Any:
    rows = read_table(folder / data.table, **data.form)
    if absent := [column for column in data.columns.values() if column not in rows.columns]:
        raise DataError(
            f"{data.table} has no column {absent[0]!r}, which stands under [data.columns] of"
            f" {FILE}; it has {few_of(rows.columns)}{did_you_mean(absent[0], rows.columns)}"
        )
    rows = rows.rename(columns={here: ours for ours, here in data.columns.items()})
    check_names(rows.columns, f"{data.table}, with the names under [data.columns] of {FILE},")
    if data.target not in rows.columns:
        raise DataError(
            f"{data.table} has no column {data.target!r}, which is `target` in [data] of {FILE}; it"
            " has "
            f"{', '.join(map(str, rows.columns))}. Set `target` as user 0 calls it, and where your"
            " table calls it "
            f'otherwise, write {data.target} = "your name" under [data.columns]'
        )
    return rows[rows[data.target].notna()]


def _known(rows: Any, data: Data, preparation: Preparation) -> Any:
    """Return the rows of classes that user 0 knew when it made the kits.

    One of another kind changes no other.
    """
    if preparation.classes:
        values = rows[data.target]
        by_text = {as_category(each): each for each in preparation.classes}
        named = values.map(lambda value: by_text.get(as_category(value), value))
        rows = rows.assign(**{data.target: values.where(values.isin(preparation.classes), named)})
        rows = rows[rows[data.target].isin(preparation.classes)]
    if rows.empty:
        known = ", ".join(map(str, preparation.classes))
        raise DataError(
            f"no row of {data.table} has a class that user 0 knows, which are {known}; call them in"
            " the column `target` as user 0 does"
        )
    return rows


def _model(model: Model, preparation: Preparation) -> tuple[nn.Module, Loss]:
    made = models.build(model.name, preparation.n_inputs, preparation.n_outputs)
    return made, _imported(model.loss) if model.loss else models.loss_of(preparation)


def _loaded(folder: Path, data: Data, model: Model) -> Participant:
    user = _imported(data.loader)(folder)
    if not isinstance(user, User):
        raise DataError(f"{data.loader} must return a coterie.User, got {type(user).__name__}")
    if model.n_inputs is None or model.n_outputs is None or not model.loss:
        raise KnobError("with a loader, [model] must have `n_inputs`, `n_outputs` and `loss`")
    made = models.build(model.name, model.n_inputs, model.n_outputs)
    return Participant(user, made, _imported(model.loss))


def _imported(path: str) -> Any:
    """Return what "module.path:name" names."""
    module, colon, name = path.partition(":")
    if not colon:
        raise KnobError(f"{path!r} must be module.path:function")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        remedy = "put its module on PYTHONPATH"
        raise KnobError(f"{path!r} cannot be found: {error}; {remedy}") from error
