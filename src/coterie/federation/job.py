"""The job that NVFLARE runs: it names classes that everybody has installed, and carries no code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
LEAD_CLASS = "coterie.federation.lead_job.User0"
SITE_CLASS = "coterie.federation.site_job.Site"
RELAY_CLASS = "coterie.federation.everyone.relay_job.Relay"
MEMBER_CLASS = "coterie.federation.everyone.member_job.MemberSite"

# Arrays travel in the message itself: as references, to be fetched one by one, they take several
# times as long.
_INLINE = {"np_download_chunk_size": 0}


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
    server: dict[str, Any] = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": CONTROLLER,
                "args": {"server_obj_id": "_server", "props": {}},
            }
        ],
        "components": [{"id": "_server", "path": server_class(everyone), "args": {}}],
        **_INLINE,
    }
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client", "props": {}}}
    client: dict[str, Any] = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": site_class(everyone), "args": {}}],
        **_INLINE,
    }
    meta: dict[str, Any] = {"name": name, "resource_spec": {}, "min_clients": 1}
    meta["deploy_map"] = {"app": ["server", *sites]}
    job = folder / name
    files = {
        "meta.json": meta,
        "app/config/config_fed_server.json": server,
        "app/config/config_fed_client.json": client,
    }
    for path, content in files.items():
        (job / path).parent.mkdir(parents=True, exist_ok=True)
        (job / path).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return job
