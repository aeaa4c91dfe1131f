"""The consortium's folders: certificates and settings for user 0 and for every site."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.engines.peer import MAX_POINTS
from coterie.errors import CoterieError, KnobError
from coterie.federation.job import CONTROLLER, EXECUTOR, LEAD_CLASS, SITE_CLASS

LEAD = "lead@coterie.org"
MAX_EXTRA_BYTES = 16 * 2**20
"""How many bytes a message may have beside the numbers of the model."""


PROJECT = """api_version: 3
name: {name}
description: a consortium of coterie
participants:
  - {{name: {server}, type: server, org: user0, fed_learn_port: {port}, admin_port: {admin_port}}}
{clients}
  - {{name: {lead}, type: admin, org: user0, role: lead}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config, scheme: tcp}}  # TLS with certificates on both sides
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


@dataclass(frozen=True)
class Consortium:
    """Who takes part and where user 0 can be reached."""

    name: str
    server: str  # the host name of user 0's server, as the sites reach it
    sites: tuple[str, ...]
    port: int = 8002  # where the server listens for sites
    admin_port: int = 8003  # where it listens for user 0's own commands

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise KnobError(f"`sites` must be different names, at least one, got {list(self.sites)}")
        for name in (self.name, *self.sites):
            if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
                raise KnobError(f"names must be letters, digits, - and _, got {name!r}")
        if self.server in self.sites:
            raise KnobError(f"`server` must not be the name of a site, got {self.server!r}")

    def project(self) -> str:
        """Return the provisioning project of NVFLARE, as YAML."""
        clients = (f"  - {{name: {site}, type: client, org: {site.replace('-', '_')}}}" for site in self.sites)
        return PROJECT.format(clients="\n".join(clients), lead=LEAD, **vars(self))


def provision(consortium: Consortium, folder: Path, size: int) -> None:
    """Write `project.yml`, make the certificates, and lay out `server`, `lead` and `sites/NAME`.

    `authority` in the folder holds the key that all certificates are signed with. The size is how many numbers the
    model has: a message far larger than one of `MAX_POINTS` points is refused before it is held in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "project.yml").exists():
        raise KnobError(f"{folder} already holds a consortium; name another folder")
    (folder / "project.yml").write_text(consortium.project(), encoding="utf-8")
    authority = folder / "authority"
    _nvflare_provision(folder / "project.yml", authority)
    kits = authority / consortium.name / "prod_00"
    (folder / "sites").mkdir()
    shutil.move(kits / consortium.server, folder / "server")
    shutil.move(kits / LEAD, folder / "lead")
    for site in consortium.sites:
        shutil.move(kits / site, folder / "sites" / site)
        _pin(folder / "sites" / site, (EXECUTOR, SITE_CLASS), MAX_EXTRA_BYTES + 16 * MAX_POINTS * size)
    _pin(folder / "server", (CONTROLLER, LEAD_CLASS), MAX_EXTRA_BYTES + 16 * MAX_POINTS * size)
    _keep_jobs_here(folder / "server")
    authority.chmod(0o700)


def _nvflare_provision(project: Path, workspace: Path) -> None:
    if importlib.util.find_spec("nvflare") is None:
        raise CoterieError("NVFLARE is not installed; `pip install coterie[flare]`")
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(project), "-w", str(workspace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own arguments
    if done.returncode:
        raise CoterieError(f"NVFLARE could not provision {project}: {done.stdout}{done.stderr}")


def _pin(kit: Path, classes: Sequence[str], most_bytes: int) -> None:
    """Let a participant make these classes only, take no code, no shell command and no huge message."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources |= {"class_allow_list": list(classes), "class_list_enforcement_mode": "enforce"}
    resources["allow_log_streaming"] = False
    resources["components"] = [c for c in resources["components"] if "log" not in c["id"]]
    rights = dict.fromkeys(("clone_job", "operate", "shell_commands", "byoc"), "none")
    rights |= {"submit_job": "any", "manage_job": "n:submitter", "download_job": "n:submitter", "view": "any"}
    logs = json.loads((local / "log_config.json.default").read_text(encoding="utf-8"))
    logs["loggers"]["nvflare.collab"] = {"level": "WARNING"}  # else several lines for every gradient
    _write(local / "resources.json", resources)
    _write(local / "authorization.json", {"format_version": "1.0", "permissions": {"lead": rights}})
    _write(local / "log_config.json", logs)
    _write(local / "comm_config.json", {"streaming_max_blob_size": most_bytes})


def _keep_jobs_here(server: Path) -> None:
    """Keep the server's jobs in its own folder, not in a temporary one that servers share."""
    path = server / "local" / "resources.json"
    resources = json.loads(path.read_text(encoding="utf-8"))
    store = str((server / "jobs").absolute())
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = store + "/snapshots"
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = store
    _write(path, resources)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
