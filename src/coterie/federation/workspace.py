"""NVFLARE's processes.

A site's folder for them, written by the code installed there, and how they are started.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.engines.messages import MAX_POINTS
from coterie.errors import CoterieError, KnobError, not_installed
from coterie.federation.manifest import CERTIFICATES, Kit, filled
from coterie.federation.watching import LOG

CONTROLLER = "coterie.federation.jobs.StandingController"
EXECUTOR = "coterie.federation.jobs.StandingExecutor"
SERVER_CLASS = {False: "coterie.federation.jobs.User0", True: "coterie.federation.jobs.Relay"}
SITE_CLASS = {False: "coterie.federation.jobs.Site", True: "coterie.federation.jobs.MemberSite"}
"""What a job makes at the server and at a site, by whether everyone trains."""

WORKSPACE = "nvflare"
"""Where NVFLARE works in a site's folder."""

MAX_EXTRA_BYTES = 16 * 2**20
"""How many bytes a message may have beside the numbers of the model."""

SECONDS_BETWEEN_LOOKS = 0.5
"""How long to wait from one look at what the process has done to the next."""

SECONDS_BETWEEN_SIGNS_OF_LIFE = 2
"""How often a site tells the server that it is there, which knows by it who is lost."""

RIGHTS = dict.fromkeys(("clone_job", "operate", "shell_commands", "byoc"), "none") | {
    "submit_job": "any",
    "manage_job": "n:submitter",
    "download_job": "n:submitter",
    "view": "any",
}
"""What user 0 may do, at the server and at a site: no code of its own, no shell command."""

_MANAGER = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
_OF_NVFLARE = "nvflare.app_common.resource_{0}s.gpu_resource_{0}.GPUResource{1}"
_COMPONENTS: list[dict[str, Any]] = [
    {"id": f"resource_{kind}", "path": _OF_NVFLARE.format(kind, kind.title()), "args": args}
    for kind, args in {"manager": _MANAGER, "consumer": {}}.items()
]
_LOADED = {"server": "server.runner_process", "site": "client.worker_process"}
"""What the process of a job needs of NVFLARE."""


def write_job(
    folder: Path, sites: Sequence[str], name: str = "coterie", *, everyone: bool = False
) -> Path:
    """Write the job of these sites to a folder, and return its path; one that is not there may come later."""
    # Arrays travel in the message itself (chunks of 0): as references, to be fetched one by one,
    # they take several times as long.
    made: dict[str, Any] = {"server": SERVER_CLASS[everyone], "client": SITE_CLASS[everyone]}
    made |= {"controller": CONTROLLER, "executor": EXECUTOR, "sites": list(sites)}
    config, job = folder / name / "app" / "config", folder / name
    config.mkdir(parents=True, exist_ok=True)
    for file in ("config_fed_server.json", "config_fed_client.json"):
        (config / file).write_text(filled(file, **made), encoding="utf-8")
    meta: dict[str, Any] = {"name": name, "resource_spec": {}, "min_clients": 1}
    meta["deploy_map"] = {"app": ["server", *sites]}
    (job / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    return job


def site_workspace(folder: Path, kit: Kit, classes: Sequence[str] | None = None) -> Path:
    """Write a site's workspace anew, and return it.

    The certificates are the kit's; all else is written here, so that nothing that user 0 made is
    configuration, let alone code. A job may make these classes, or when None the two that it needs;
    a message far larger than `MAX_POINTS` points is refused before it is held in memory.
    """
    classes = (EXECUTOR, SITE_CLASS[kit.everyone]) if classes is None else classes
    place = folder / WORKSPACE
    for part in ("startup", "local"):
        shutil.rmtree(place / part, ignore_errors=True)
        (place / part).mkdir(parents=True, mode=0o700)
    for name in CERTIFICATES:
        shutil.copyfile(folder / name, place / "startup" / name)
        (place / "startup" / name).chmod(0o600)
    connection = filled("fed_client.json", kit=kit)  # TLS, with certificates on both sides
    (place / "startup" / "fed_client.json").write_text(connection, encoding="utf-8")
    components = [*_COMPONENTS, launcher("site", SITE_CLASS[kit.everyone])]
    client = {"retry_timeout": 30, "compression": "Gzip"}
    resources: dict[str, Any] = {"format_version": 2, "client": client}
    resources |= {"components": components, "allow_log_streaming": False}
    write_limits(place / "local", resources, classes, kit.size)
    # Collab has several lines for every gradient, of which this takes warnings only
    (place / "local" / "log_config.json").write_text(filled("log_config.json"), encoding="utf-8")
    return place


def launcher(whose: str, made: str) -> dict[str, Any]:
    """Return the component that starts the processes of jobs, at the "server" or a "site"; a job makes this class."""
    loaded = [f"nvflare.private.fed.app.{_LOADED[whose]}", made.rpartition(".")[0]]
    path = "coterie.federation.launching.SpareLauncher"
    # who passes messages on lets all begin anew: that takes a new job
    args = {"whose": whose, "modules": loaded, "again": made != SERVER_CLASS[True]}
    return {"id": "process_launcher", "path": path, "args": args}


def write_limits(
    local: Path, resources: Mapping[str, Any], classes: Sequence[str], size: int
) -> None:
    """Let a participant make these classes only, and take no code, no shell command and no huge message."""
    pinned = {"class_allow_list": list(classes), "class_list_enforcement_mode": "enforce"}
    write_configuration(local / "resources.json", {**resources, **pinned})
    rights = {"format_version": "1.0", "permissions": {"lead": RIGHTS}}
    write_configuration(local / "authorization.json", rights)
    most = MAX_EXTRA_BYTES + 16 * MAX_POINTS * size
    write_configuration(local / "comm_config.json", {"streaming_max_blob_size": most})


def write_configuration(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of NVFLARE's."""
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def site_command(place: Path, kit: Kit) -> list[str]:
    """Return what starts a site's client."""
    options = [f"uid={kit.site}", f"heart_beat_interval={SECONDS_BETWEEN_SIGNS_OF_LIFE}"]
    return _command("client.client_train", place, "fed_client.json", options, kit.site)


def server_command(place: Path) -> list[str]:
    """Return what starts user 0's server."""
    if not (place / "startup" / "fed_server.json").exists():
        raise KnobError(f"there is no server in {place}; `coterie federate init` writes it")
    return _command("server.server_train", place, "fed_server.json", [], "user0")


def _command(
    module: str, place: Path, file: str, options: Sequence[str], organisation: str
) -> list[str]:
    require_nvflare()
    start = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}"]
    start += ["-m", str(place.absolute())]
    org = f"org={organisation.replace('-', '_')}"
    usual = ["secure_train=true", org, "config_folder=config"]
    return [*start, "-s", file, "--set", *usual, *options]


def surroundings() -> dict[str, str]:
    """Return the environment of NVFLARE's processes, which import nothing from the folder that they run in."""
    return {"MALLOC_ARENA_MAX": "4"} | os.environ | {"PYTHONSAFEPATH": "1"}


def require_nvflare() -> None:
    """Refuse to go on where NVFLARE is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise CoterieError(not_installed("NVFLARE", "flare"))


def run_process(
    command: Sequence[str], place: Path, watching: Callable[[], Callable[[], None]]
) -> int:
    """Start NVFLARE's process, wait for its end, and end it and its children with this process.

    Return its status.

    What it writes is its owner's alone, and what it says goes to `LOG`. While it starts,
    `watching` returns what is called now and then; an error there ends it.
    """
    import psutil  # which NVFLARE brings

    (place / "transfer").mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (place / LOG).open("ab") as log:
        (place / LOG).chmod(0o600)
        # In a session of its own: NVFLARE takes no notice of Ctrl-C.
        options: dict[str, Any] = {"start_new_session": True, "umask": 0o077}
        options |= {"stdout": log, "stderr": log, "env": surroundings()}
        process = psutil.Popen(list(command), **options)
    try:
        watch = watching()
        while True:
            try:
                return int(process.wait(timeout=SECONDS_BETWEEN_LOOKS))
            except psutil.TimeoutExpired:
                watch()
    finally:
        # a second one must not keep this from being done
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process.is_running():
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                    each.kill()
            process.wait()
