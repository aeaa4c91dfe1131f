"""The consortium's folders: certificates and settings for user 0 and for every site."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from coterie.errors import CoterieError, KnobError
from coterie.federation.manifest import CERTIFICATES, check_host, check_name, filled
from coterie.federation.workspace import (
    CONTROLLER,
    SERVER_CLASS,
    launcher,
    require_nvflare,
    write_configuration,
    write_limits,
)

LEAD = "lead@coterie.org"
PRIVATE = (".key", ".json", ".pem", ".pfx")
"""How the names of files end that only their owner may read."""

ADMIN_HOST = "127.0.0.1"
"""Where the server listens for user 0's own commands, which come from the same machine."""


@dataclass(frozen=True)
class Consortium:
    """Who takes part and where user 0 can be reached."""

    name: str
    server: str  # the host name of user 0's server, as the sites reach it
    sites: tuple[str, ...]
    port: int = 8002  # where the server listens for sites
    admin_port: int = 8003  # where it listens for user 0's own commands
    # every site trains a model of its own, and the server passes messages on
    everyone: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise KnobError(
                f"`sites` must be different names, at least one, got {list(self.sites)}"
            )
        for name in (self.name, *self.sites):
            check_name(name)
        check_host(self.server)
        if self.everyone and len(self.sites) < 2:
            raise KnobError(
                f"`sites` must be two or more where everyone trains, got {list(self.sites)}"
            )
        if self.server in self.sites:
            raise KnobError(f"`server` must not be the name of a site, got {self.server!r}")

    def project(self) -> str:
        """Return the provisioning project of NVFLARE, as YAML."""
        clients = [client_line(site) for site in self.sites]
        return filled("project.yml", about=self, lead=LEAD, clients=clients)


def client_line(site: str) -> str:
    """Return the line of a site in the project."""
    org = json.dumps(site.replace("-", "_"))  # `true` and 123 are names too
    return f"  - {{name: {json.dumps(site)}, type: client, org: {org}}}"


def provision(consortium: Consortium, folder: Path, size: int) -> None:
    """Write `project.yml`, make the certificates, and lay out `server`, `lead` and `sites/NAME`.

    `authority` in the folder holds the key that all certificates are signed with; the folder is its
    owner's alone. Of what NVFLARE makes for a site only the certificates are handed out. The size
    is how many numbers the model
    has: a message far larger is refused before it is held in memory.
    """
    require_nvflare()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "project.yml").exists():
        raise KnobError(f"{folder} already holds a consortium; name another folder")
    folder.chmod(0o700)
    (folder / "project.yml").write_text(consortium.project(), encoding="utf-8")
    authority = folder / "authority"
    _nvflare_provision(folder / "project.yml", authority)
    made = authority / consortium.name / "prod_00"
    shutil.move(made / consortium.server, folder / "server")
    shutil.move(made / LEAD, folder / "lead")
    for site in consortium.sites:
        kit = folder / "sites" / site
        kit.mkdir(parents=True, mode=0o700)
        for name in CERTIFICATES:
            shutil.move(made / site / "startup" / name, kit / name)
        shutil.rmtree(made / site)
    _pin_server(folder / "server", size, SERVER_CLASS[consortium.everyone])
    _listen_here(folder)
    authority.chmod(0o700)
    for path in folder.rglob("*"):  # keys, and what NVFLARE keeps of them
        if path.is_file() and path.suffix in PRIVATE:
            path.chmod(0o600)


def provision_again(folder: Path, name: str) -> Path:
    """Let the authority sign what has no certificate yet, and return where all of them are."""
    _nvflare_provision(folder / "project.yml", folder / "authority")
    for path in (folder / "authority").rglob("*"):
        if path.is_file() and path.suffix in PRIVATE:
            path.chmod(0o600)
    return max((folder / "authority" / name).glob("prod_*"))


def _nvflare_provision(project: Path, workspace: Path) -> None:
    # `--force`: into a workspace that exists it goes on with the authority there
    command = [sys.executable, "-m", "nvflare.cli", "provision", "--force"]
    command += ["-p", str(project), "-w", str(workspace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own arguments
    if done.returncode:
        raise CoterieError(f"NVFLARE could not provision {project}: {done.stdout}{done.stderr}")


def _listen_here(folder: Path) -> None:
    """Let the server take user 0's commands from its own machine only."""
    started = folder / "server/startup/fed_server.json"
    asks = folder / "lead/startup/fed_admin.json"
    of_server, of_lead = {"admin_host": ADMIN_HOST}, {"host": "localhost"}
    for path, part, here in ((started, "servers", of_server), (asks, "admin", of_lead)):
        content = json.loads(path.read_text(encoding="utf-8"))
        for each in content[part] if isinstance(content[part], list) else [content[part]]:
            each.update(here)
        write_configuration(path, content)


def _pin_server(server: Path, size: int, kind: str) -> None:
    """Let the server make two classes only, and keep its jobs in its own folder, not in one that servers share."""
    local, store = server / "local", str((server / "jobs").absolute())
    resources = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources["allow_log_streaming"] = False
    kept = [c for c in resources["components"] if "log" not in c["id"]]
    resources["components"] = [
        launcher("server", kind) if c["id"] == "process_launcher" else c for c in kept
    ]
    rejoining = "coterie.federation.launching.Rejoining"
    resources["components"].append({"id": "rejoining", "path": rejoining, "args": {}})
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = store + "/snapshots"
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = store
    write_limits(local, resources, (CONTROLLER, kind), size)
    logs = json.loads((local / "log_config.json.default").read_text(encoding="utf-8"))
    # else several lines for every gradient
    logs["loggers"]["nvflare.collab"] = {"level": "WARNING"}
    write_configuration(local / "log_config.json", logs)
