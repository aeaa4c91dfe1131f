"""The job that NVFLARE runs: it names classes that everybody has installed, and carries no code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.federation.manifest import filled

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
LEAD_CLASS = "coterie.federation.lead_job.User0"
SITE_CLASS = "coterie.federation.site_job.Site"
RELAY_CLASS = "coterie.federation.everyone.relay_job.Relay"
MEMBER_CLASS = "coterie.federation.everyone.member_job.MemberSite"


def server_class(everyone: bool) -> str:
    """Return the class that the server makes.

    One that passes messages on where everyone trains, else user 0.
    """
    return RELAY_CLASS if everyone else LEAD_CLASS


def site_class(everyone: bool) -> str:
    """Return the class that a site makes: one that trains too where everyone does."""
    return MEMBER_CLASS if everyone else SITE_CLASS


def write_job(
    folder: Path, sites: Sequence[str], name: str = "coterie", *, everyone: bool = False
) -> Path:
    """Write the job of these sites to a folder, and return its path.

    One that is lost is not named: NVFLARE would wait a minute for it.
    """
    # Arrays travel in the message itself (chunks of 0): as references, to be fetched one by one,
    # they take several times as long.
    made = {"server": server_class(everyone), "client": site_class(everyone)}
    made |= {"controller": CONTROLLER, "executor": EXECUTOR}
    config, job = folder / name / "app" / "config", folder / name
    config.mkdir(parents=True, exist_ok=True)
    for file in ("config_fed_server.json", "config_fed_client.json"):
        (config / file).write_text(filled(file, **made), encoding="utf-8")
    meta: dict[str, Any] = {"name": name, "resource_spec": {}, "min_clients": 1}
    meta["deploy_map"] = {"app": ["server", *sites]}
    (job / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    return job
