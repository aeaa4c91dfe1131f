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

from coterie.engines.requests import MAX_POINTS
from coterie.errors import CoterieError, KnobError, not_installed
from coterie.federation.job import CONTROLLER, EXECUTOR, site_class
from coterie.federation.manifest import CERTIFICATES, Kit, filled
from coterie.federation.watching import LOG

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
_COMPONENTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("resource_manager", "resource_managers.gpu_resource_manager.GPUResourceManager", _MANAGER),
    ("resource_consumer", "resource_consumers.gpu_resource_consumer.GPUResourceConsumer", {}),
)
_LOADED = {
    "server": ["nvflare.private.fed.app.server.runner_process", CONTROLLER.rpartition(".")[0]],
    "site": ["nvflare.private.fed.app.client.worker_process", EXECUTOR.rpartition(".")[0]],
}
"""What the process of a job needs of NVFLARE."""


def site_workspace(folder: Path, kit: Kit, classes: Sequence[str] | None = None) -> Path:
    """Write a site's workspace anew, and return it.

    The certificates are the kit's; all else is written here, so that nothing that user 0 made is
    configuration, let alone code. A job may make these classes, or when None the two that it needs;
    a message far larger than `MAX_POINTS` points is refused before it is held in memory.
    """
    classes = (EXECUTOR, site_class(kit.everyone)) if classes is None else classes
    place = folder / WORKSPACE
    for part in ("startup", "local"):
        shutil.rmtree(place / part, ignore_errors=True)
        (place / part).mkdir(parents=True, mode=0o700)
    for name in CERTIFICATES:
        shutil.copyfile(folder / name, place / "startup" / name)
        (place / "startup" / name).chmod(0o600)
    connection = filled("fed_client.json", kit=kit)  # TLS, with certificates on both sides
    (place / "startup" / "fed_client.json").write_text(connection, encoding="utf-8")
    components = [
        {"id": id_, "path": f"nvflare.app_common.{path}", "args": args}
        for id_, path, args in _COMPONENTS
    ]
    components.append(launcher("site", site_class(kit.everyone)))
    resources: dict[str, Any] = {
        "format_version": 2,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
    }
    resources |= {"components": components, "allow_log_streaming": False}
    write_limits(place / "local", resources, classes, kit.size)
    # Collab has several lines for every gradient, of which this takes warnings only
    (place / "local" / "log_config.json").write_text(filled("log_config.json"), encoding="utf-8")
    return place


def launcher(whose: str, made: str) -> dict[str, Any]:
    """Return the component that starts the processes of jobs, at the "server" or a "site"; a job makes this class."""
    loaded = _LOADED[whose] + [made.rpartition(".")[0], "skops.io"]
    path = "coterie.federation.spare.SpareLauncher"
    return {"id": "process_launcher", "path": path, "args": {"whose": whose, "modules": loaded}}


def write_limits(
    local: Path, resources: Mapping[str, Any], classes: Sequence[str], size: int
) -> None:
    """Let a participant make these classes only, and take no code, no shell command and no huge message."""
    pinned = {"class_allow_list": list(classes), "class_list_enforcement_mode": "enforce"}
    write_configuration(local / "resources.json", {**resources, **pinned})
    rights = {"format_version": "1.0", "permissions": {"lead": RIGHTS}}
    write_configuration(local / "authorization.json", rights)
    write_configuration(
        local / "comm_config.json",
        {"streaming_max_blob_size": MAX_EXTRA_BYTES + 16 * MAX_POINTS * size},
    )


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
    start = [
        sys.executable,
        "-u",
        "-m",
        f"nvflare.private.fed.app.{module}",
        "-m",
        str(place.absolute()),
    ]
    org = f"org={organisation.replace('-', '_')}"
    usual = ["secure_train=true", org, "config_folder=config"]
    return [*start, "-s", file, "--set", *usual, *options]


def surroundings() -> dict[str, str]:
    """Return the environment of NVFLARE's processes, which import nothing from the folder that they run in."""
    return os.environ | {
        "PYTHONSAFEPATH": "1",
        "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "4"),
    }


def require_nvflare() -> None:
    """Refuse to go on where NVFLARE is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise CoterieError(not_installed("NVFLARE", "flare"))


def run_process(command: Sequence[str], place: Path, watch: Callable[[], None]) -> int:
    """Start NVFLARE's process, wait for its end, and end it and its children with this process.

    Return its status.

    What it writes is its owner's alone, and what it says goes to `LOG`. `watch` is called now and
    then.
    """
    import psutil  # which NVFLARE brings

    (place / "transfer").mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (place / LOG).open("ab") as log:
        (place / LOG).chmod(0o600)
        # In a session of its own: NVFLARE takes no notice of Ctrl-C.
        options: dict[str, Any] = {
            "start_new_session": True,
            "umask": 0o077,
            "stdout": log,
            "stderr": log,
        }
        process = psutil.Popen(list(command), env=surroundings(), **options)
    try:
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
