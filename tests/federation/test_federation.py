"""A consortium's folders and settings, without processes: what is written, and what a site makes of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import signal
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.folders import claimed_elsewhere
from tests.support.members import with_known_draws
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.data import Preparation
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request, from_bytes, to_bytes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.responder import METHODS, Responder
from coterie.engines.remote.sites import LocalSites
from coterie.errors import CoterieError, DataError, FileError, KnobError, PeerLost
from coterie.federation.kits import accept, set_up
from coterie.federation.lead import (
    REFUSED,
    RUN,
    SUMMARY,
    check_plan,
    lead,
    planned_gradients,
    rule_of,
)
from coterie.federation.manifest import Kit
from coterie.federation.participants import (
    _known,
    _rows,
    lead_participant,
    peer_of,
    responder_of,
    site_participant,
)
from coterie.federation.provisioning import Consortium
from coterie.federation.settings import (
    Data,
    LeadSettings,
    Model,
    Training,
    lead_settings,
    site_settings,
)
from coterie.federation.workspace import run_process, site_workspace, write_job
from coterie.privacy import Privacy
from coterie.privacy.accountant import Event, epsilon_of
from coterie.rules.streams import StreamAveraging
from coterie.users.examples import InMemory

needs_nvflare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="NVFLARE is not installed: the extra `flare`",
)


def patients(n: int = 60, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 10, n)
    return pd.DataFrame(
        {"age": age, "sex": rng.choice(["f", "m"], n), "ill": (age + rng.normal(0, 5, n) > 50)}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A consortium of two sites, each with its table."""
    place = tmp_path_factory.mktemp("federation")
    patients().to_csv(place / "mine.csv", index=False)
    training = Training(rule="bc", alpha=0.7, steps=20, batch_size=16)
    data = Data(table=str(place / "mine.csv"), target="ill", own_examples=20)
    settings = LeadSettings("me", ("basel", "bern"), data, Model("linear"), training)
    fingerprints = set_up(
        place / "trial", Consortium("trial", "localhost", ("basel", "bern")), settings
    )
    for seed, (site, fingerprint) in enumerate(fingerprints.items(), 1):
        shutil.copytree(place / "trial" / "sites" / site, place / "kits" / site)  # as it came
        accept(place / "trial" / "sites" / site, fingerprint)
        patients(40, seed).to_csv(place / "trial" / "sites" / site / "data.csv", index=False)
        with_known_draws(place / "trial" / "sites" / site, seed)
    return place / "trial"


@needs_nvflare
def test_what_is_written_can_be_read(folder: Path) -> None:
    settings = lead_settings(folder)
    assert settings.training == Training(rule="bc", alpha=0.7, steps=20, batch_size=16)
    assert (settings.me, settings.sites) == ("me", ("basel", "bern"))
    site = site_settings(folder / "sites" / "bern")
    assert (site.name, site.data.target, site.model, site.caps) == (
        "bern",
        "ill",
        Model("linear"),
        Caps(gradients=10_000, norm=10.0, examples=16),
    )


@needs_nvflare
@pytest.mark.parametrize("who", ["server", "sites/basel", "sites/bern"])
def test_participants_take_no_code_and_no_other_class(folder: Path, who: str) -> None:
    place = (
        folder / who if who == "server" else site_workspace(folder / who, Kit.load(folder / who))
    )
    local = place / "local"
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    assert set(rights) == {"lead"}
    assert {rights["lead"][right] for right in ("byoc", "shell_commands", "operate")} == {"none"}
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_list_enforcement_mode"] == "enforce"
    named = [
        *resources["class_allow_list"],
        *(component["path"] for component in resources["components"]),
    ]
    for name in named:
        module, _, kind = name.rpartition(".")
        assert hasattr(importlib.import_module(module), kind)
    assert len(resources["class_allow_list"]) == 2
    assert json.loads((local / "comm_config.json").read_text())["streaming_max_blob_size"] < 2**25


@needs_nvflare
def test_private_keys_are_where_they_belong(folder: Path) -> None:
    site_workspace(folder / "sites" / "bern", Kit.load(folder / "sites" / "bern"))
    keys = {path.relative_to(folder).as_posix() for path in folder.rglob("*.key")}
    assert keys - {f"sites/{site}/nvflare/startup/client.key" for site in ("basel", "bern")} == {
        "server/startup/server.key",
        "lead/startup/client.key",
        "sites/basel/client.key",
        "sites/bern/client.key",
    }
    owned = [folder, folder / "authority", *(folder / key for key in keys)]
    owned += [
        path
        for path in (folder / "authority").rglob("*")
        if path.is_file() and path.suffix != ".yml"
    ]
    assert any(path.name == "cert.json" for path in owned), "which holds the key of the authority"
    owned += [
        folder / "sites" / site / name
        for site in ("basel", "bern")
        for name in ("", "coterie.toml")
    ]
    assert [path for path in owned if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    for page in folder.rglob("README.md"):
        assert page.parent.name in page.read_text()
    connection = json.loads((folder / "sites/bern/nvflare/startup/fed_client.json").read_text())
    assert connection["client"]["connection_security"] == "mtls"


@needs_nvflare
def test_handshakes_are_grpcs_and_commands_are_taken_on_this_machine_only(folder: Path) -> None:
    """NVFLARE's own TCP makes handshakes one after the other: an idle connection keeps everybody out."""
    site_workspace(folder / "sites" / "bern", Kit.load(folder / "sites" / "bern"))
    (server,) = json.loads((folder / "server/startup/fed_server.json").read_text())["servers"]
    (dialled,) = json.loads((folder / "sites/bern/nvflare/startup/fed_client.json").read_text())[
        "servers"
    ]
    admin = json.loads((folder / "lead/startup/fed_admin.json").read_text())["admin"]
    assert {server["service"]["scheme"], dialled["service"]["scheme"], admin["scheme"]} == {"grpc"}
    assert (server["admin_host"], admin["host"]) == ("127.0.0.1", "localhost")


@needs_nvflare
def test_names_that_yaml_would_take_for_something_else(folder: Path, tmp_path: Path) -> None:
    """A first try fails, as on a full disk, and leaves nothing; the second is as if there had been none."""
    settings, names = lead_settings(folder), ("true", "123", "null", "1e3", "0x10")
    settings = replace(settings, sites=names)
    consortium = Consortium("yes", "localhost", names)
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "mine.txt").write_text("")
    for place in (tmp_path / "trial", tmp_path / "new"):
        full = mock.patch("coterie.federation.kits.seal", side_effect=OSError("no room"))
        with full, pytest.raises(OSError, match="no room"):
            set_up(place, consortium, settings)
    assert [path.name for path in tmp_path.rglob("*")] == ["trial", "mine.txt"]
    assert set(set_up(tmp_path / "trial", consortium, settings)) == set(names)
    assert {path.name for path in (tmp_path / "trial" / "sites").iterdir()} == set(names)


@needs_nvflare
def test_users_are_those_of_a_table(folder: Path) -> None:
    """A site's rows are prepared with user 0's statistics, as `from_table` prepares those of a peer."""
    mine = patients().assign(who="me")
    basel = patients(40, 1).assign(who="basel")
    table = pd.concat([mine, basel], ignore_index=True)
    expected = coterie.data.from_table(
        table, user_column="who", target="ill", me="me", own_examples=20
    )
    _, task = lead_participant(folder, lead_settings(folder))
    kit = folder / "sites" / "basel"
    peer = site_participant(kit, site_settings(kit)).user
    assert task is not None
    for ours, theirs in ((task.me, expected.me), (peer, expected.peers[0])):
        assert ours.fingerprint() == theirs.fingerprint()
        assert ours.name == theirs.name


@needs_nvflare
def test_a_site_may_call_columns_otherwise(folder: Path, tmp_path: Path) -> None:
    kit = folder / "sites" / "bern"
    before = site_participant(kit, site_settings(kit)).user
    renamed = pd.read_csv(kit / "data.csv").rename(columns={"age": "years", "ill": "sick"})
    renamed.to_parquet(tmp_path / "ours.parquet")
    settings = site_settings(kit)
    data = Data(
        table=str(tmp_path / "ours.parquet"), target="ill", columns={"age": "years", "ill": "sick"}
    )
    after = site_participant(
        kit, settings.__class__("bern", data, settings.model, settings.caps)
    ).user
    assert after.fingerprint() == before.fingerprint()


@needs_nvflare
def test_user_0_leads_over_any_transport(folder: Path) -> None:
    """The whole of user 0's side, with the sites in this process."""
    kits = [folder / "sites" / site for site in ("basel", "bern")]
    lead(folder, LocalSites({kit.name: peer_of(kit) for kit in kits}))
    out = folder / RUN
    record = coterie.Record.load(out / "record.jsonl")
    assert (record.end.step, record.end.left_out) == (20, {})
    assert record.configuration.peers == {"basel": "at its site", "bern": "at its site"}
    assert "BiasCorrection" in (out / SUMMARY).read_text()
    for kit in kits:
        assert len((kit / "requests.jsonl").read_text().splitlines()) == 20
    answer = CliRunner().invoke(app, ["predict", str(out), str(kits[0] / "data.csv")])
    assert answer.exit_code == 0, answer.output
    first = torch.load(out / "model.pt", weights_only=True)
    lead(folder, LocalSites({}))  # it has ended: nobody is asked, nothing changes
    again = torch.load(out / "model.pt", weights_only=True)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert coterie.Record.load(out / "record.jsonl").end.left_out == {}


@needs_nvflare
def test_user_0_leads_with_sites_that_give_masked_sums_only(folder: Path, tmp_path: Path) -> None:
    """By settings alone, to the same model as without masks but for rounding."""
    found = {}
    for site in ("basel", "bern"):
        peer_of(folder / "sites" / site)  # it makes the secret by which batches are drawn
    for masked in (False, True):
        place = shutil.copytree(
            folder, tmp_path / str(masked), ignore=shutil.ignore_patterns(RUN, "requests*")
        )
        kits = [place / "sites" / site for site in ("basel", "bern")]
        for kit in kits:
            for secret in (folder / "sites" / kit.name).glob(
                "requests.jsonl.secret"
            ):  # the same batches
                shutil.copy(secret, kit)
            if masked:
                with (kit / "coterie.toml").open("a") as file:
                    file.write("[sums]\npeers = 2\nshare = 0.5\n")
        sites = LocalSites({})
        sites.responders = {kit.name: responder_of(kit) for kit in kits}
        if masked:
            with pytest.raises(KnobError, match=r"basel gives masked sums only"):
                lead(place, sites)
            toml = (place / "coterie.toml").read_text()
            (place / "coterie.toml").write_text(
                toml.replace("secure_sums = false", "secure_sums = true")
            )
        lead(place, sites)
        record = coterie.Record.load(place / RUN / "record.jsonl")
        assert (record.end.step, record.end.left_out) == (20, {})
        found[masked] = torch.load(place / RUN / "model.pt", weights_only=True)
    assert (
        sites.responders["basel"].peer.identity.fingerprint
        in (kits[1] / "requests.jsonl").read_text()
    )
    said = CliRunner().invoke(app, ["federate", "check", str(kits[0])]).output
    assert sites.responders["basel"].peer.identity.fingerprint in said
    for name in found[False]:
        torch.testing.assert_close(found[True][name], found[False][name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", ["adaptive", "stream"])
def test_masked_sums_are_refused_for_rules_that_need_rows(rule: str) -> None:
    training = Training(rule=rule, secure_sums=True)
    with pytest.raises(
        KnobError, match="needs each site's gradient, and `secure_sums` gives their sum alone"
    ):
        rule_of(LeadSettings("me", ("basel", "bern"), Data(), Model(), training))
    with pytest.raises(KnobError, match="takes neither `compress`"):
        Training(rule="wga", secure_sums=True, compress="bf16")


@needs_nvflare
@pytest.mark.parametrize("classes", [[0, 1], [1.5, 2.5], [False, True]], ids=str)
def test_a_row_of_an_unknown_class_is_left_out_and_changes_no_other(
    classes: list[Any], tmp_path: Path
) -> None:
    preparation = Preparation.fit(
        patients()[["age"]], pd.Series(classes), pd.Series(classes), "classification"
    )
    rows = [f"{40 + k},{classes[k % 2]}" for k in range(5)]
    for table, more in (("some.csv", []), ("one_more.csv", ["50,unknown"])):
        (tmp_path / table).write_text("\n".join(["age,ill", *rows, *more]))
        data = Data(table=table, target="ill")
        inputs, targets = preparation.examples(
            _known(_rows(tmp_path, data), data, preparation), "ill"
        )
        assert isinstance(targets, torch.Tensor)
        assert targets.tolist() == [0, 1, 0, 1, 0]
        assert len(inputs) == 5


def test_a_site_says_how_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "site.csv").write_text("4,5;1\n?;0\n")
    form: dict[str, Any] = {"sep": ";", "decimal": ",", "na_values": "?", "header": "age,ill"}
    (tmp_path / "coterie.toml").write_text(
        'name = "basel"\n[data]\ntable = "site.csv"\ntarget = "ill"\n'
        + "\n".join(f'{name} = "{value}"' for name, value in form.items())
    )
    rows = _rows(tmp_path, site_settings(tmp_path).data)
    assert rows["age"].tolist()[0] == 4.5
    assert rows["age"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"age": "Alter"}, r"no column 'Alter', which stands under \[data.columns\]"),
        ({"ill": "sex"}, r"2 columns called 'ill'"),
    ],
)
def test_names_of_columns_that_cannot_be_meant_are_told(
    columns: dict[str, str], said: str, tmp_path: Path
) -> None:
    patients().to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(DataError, match=said):
        _rows(tmp_path, Data(table="data.csv", target="ill", columns=columns))
    rows = _rows(
        tmp_path, Data(table="data.csv", target="ill", columns={"age": "sex", "sex": "age"})
    )
    assert rows["age"].isin(["f", "m"]).all(), "two that change places"


@needs_nvflare
def test_check_says_what_a_site_would_give(folder: Path) -> None:
    answer = CliRunner().invoke(app, ["federate", "check", str(folder / "sites" / "basel")])
    assert answer.exit_code == 0, answer.output
    assert re.search(
        r"basel: 40 examples; gradients of \d+ numbers; \d+ given before", answer.output
    )
    assert (
        "given at most: 10000 gradients in all, clipped to norm 10, each of 16 examples or more"
        in answer.output
    )


@needs_nvflare
def test_a_private_site_says_what_it_promises(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("dp_accounting")
    kit = shutil.copytree(folder / "sites" / "basel", tmp_path / "basel")
    for path in kit.glob("requests.jsonl*"):
        path.unlink()
    text = (kit / "coterie.toml").read_text()
    proposed = re.sub(r"# (\[privacy\]|epsilon|delta|clip|noise)", r"\1", text)
    (kit / "coterie.toml").write_text(proposed)
    with pytest.raises(KnobError, match="`norm` must be left out"):
        peer_of(kit)
    (kit / "coterie.toml").write_text(proposed.replace("norm = 10.0", "norm = inf"))
    assert site_settings(kit).privacy == Privacy(epsilon=4.0, delta=1e-5, clip=1.0, noise=1.0)
    peer = peer_of(kit)
    asked = Request(torch.zeros(1, peer.passes.parameters.size), 0, 0, 16)
    assert peer.answer(asked).gradients is not None
    assert peer.epsilon == epsilon_of({Event(16 / 40, 1.0): 1}, 1e-5)
    answer = CliRunner().invoke(app, ["federate", "check", str(kit)])
    assert "promised: ε = 4 at δ = 1e-05 for every example, clipped to norm 1" in answer.output
    assert f"ε = {peer.epsilon:.3g} spent before" in answer.output
    assert "of the 20 gradients of 16 rows that me plans, ε and the caps allow 0" in answer.output
    with pytest.raises(
        KnobError, match="basel gives 0 more gradients, and this run may ask for 20"
    ):
        check_plan(lead_settings(folder), LocalSites({"basel": peer}))  # of its ε
    assert "a run with it does not have the same bits again" in caplog.text
    (kit / "coterie.toml").write_text(
        proposed.replace("norm = 10.0", "").replace("noise = 1.0", "noise = 2.0")
    )
    spent = ({Event(16 / 40, 1.0): 1, Event(16 / 40, 2.0): more} for more in range(20))
    most = sum(epsilon_of(events, 1e-5) <= 4.0 for events in spent) - 1
    assert 0 < most < 18
    answer = CliRunner().invoke(app, ["federate", "check", str(kit)])
    assert (
        f"of the 20 gradients of 16 rows that me plans, ε and the caps allow {most}, with noise of 0.125"
        in answer.output
    )
    (kit / "coterie.toml").write_text(proposed.replace("# batch_size", "batch_size"))
    promised = site_settings(kit).privacy
    assert promised is not None
    assert promised.batch_size == lead_settings(folder).training.batch_size, (
        "what user 0 plans is proposed"
    )
    (kit / "coterie.toml").write_text(proposed.replace("delta = 1e-5 ", "# "))
    with pytest.raises(KnobError, match=r"\[privacy\] must have 'delta'"):
        site_settings(kit)


@needs_nvflare
def test_a_folder_is_not_overwritten(folder: Path) -> None:
    settings = lead_settings(folder)
    with pytest.raises(KnobError, match="already holds a consortium"):
        set_up(folder, Consortium("trial", "localhost", ("basel",)), settings)


def test_init_without_nvflare_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nvflare" else found(name)
    )
    patients().to_csv(tmp_path / "mine.csv", index=False)
    command = ["federate", "init", str(tmp_path / "trial"), "--data", str(tmp_path / "mine.csv")]
    answer = CliRunner().invoke(
        app, [*command, "--target", "ill", "--server", "localhost", "--site", "a"]
    )
    assert answer.exit_code == 2
    assert 'pip install "nvflare<2.10,>=2.9"' in answer.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"coterie.toml cannot be read .*`coterie federate init` writes it"),
        ('name = "a"\ncaps = 3', "`caps` must be a table of settings"),
        ("name = ", "cannot be read"),
        ('name = "a"\nhobby = 1', "'hobby', which is not a setting"),
        ('name = "a"\n[caps]\ngradient = 1', "'gradient', which is not a setting"),
        ('name = "a"\n[caps]\nexamples = 0', "`examples` must be a whole number, at least 1"),
        ('name = "a"\n[caps]\ngradients = "many"', "`gradients` must be a whole number"),
        ('name = "a"\n[data]\nloader = "nowhere"', "must be module.path:function"),
        ('name = "a"\n[data]\nloader = "nowhere.at:all"', "cannot be found"),
        ("threads = 1", "must have 'name'"),
        ('name = "a"\nthreads = "two"', "`threads` must be a whole number"),
        ('name = "a"\n[data]\ntable = 3', "`table` must be a text, got 3"),
        ('name = "a"\n[data]\nloader = "pathlib:Path"', "must return a coterie.User"),
        (
            'name = "a"\n[training]\nminimum = 0',
            "`minimum` must be a whole number, at least 1, got 0",
        ),
    ],
)
def test_settings_at_fault_are_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "coterie.toml").write_text(text)
    with pytest.raises(CoterieError, match=message):
        peer_of(tmp_path)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"sites": ()}, "at least one"),
        ({"sites": ("a", "a")}, "different names"),
        ({"sites": ("a b",)}, "letters, digits"),
        ({"sites": ("localhost",)}, "must not be the name of a site"),
        ({"name": "no name"}, "letters, digits"),
    ],
)
def test_names_are_checked(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        Consortium(**{"name": "trial", "server": "localhost", "sites": ("a",)} | knobs)


def test_rules_by_name() -> None:
    def chosen(**knobs: Any) -> Any:
        return rule_of(LeadSettings("me", ("a",), Data(), Model(), Training(**knobs)))

    assert chosen(rule="wga", alpha=0.3) == coterie.WeightedAveraging(0.3)
    assert chosen(rule="bc", alpha=0.3, beta=0.2) == coterie.BiasCorrection(0.3, 0.2)
    assert chosen(rule="alone") == coterie.Alone()
    assert chosen(rule="stream", steps=7) == StreamAveraging(7)
    assert chosen(rule="bc", knobs={"warm_up": False}) == coterie.BiasCorrection(
        0.5, 0.01, warm_up=False
    )
    with pytest.raises(KnobError, match="'wga' takes no `beta`"):
        chosen(rule="wga", beta=0.1)
    with pytest.raises(KnobError, match="needs the number of examples of 'a'"):
        chosen(rule="pooled")
    assert chosen() == chosen(rule="adaptive") == coterie.AdaptiveAveraging()
    assert chosen(rule="wga", alpha="auto") == coterie.WeightedAveraging("auto")


@needs_nvflare
def test_a_table_without_the_target_is_a_data_error(folder: Path, tmp_path: Path) -> None:
    kit = folder / "sites" / "bern"
    settings = site_settings(kit)
    pd.read_csv(kit / "data.csv").drop(columns="ill").to_csv(tmp_path / "no.csv")
    data = Data(table=str(tmp_path / "no.csv"), target="ill")
    with pytest.raises(
        DataError, match=r"`target` in \[data\] of coterie.toml; it has .* under \[data.columns\]"
    ):
        site_participant(kit, settings.__class__("bern", data, settings.model, settings.caps))


@needs_nvflare
def test_user_0_exchanges_less_often_in_half_precision(folder: Path, tmp_path: Path) -> None:
    """As `coterie.toml` says: 20 steps by 4 exchanges of 3 local steps each, counted before and after.

    Sites draw batches by chance, and the guard may leave out an exchange for them; of all rows
    there is one batch.
    """
    copied = tmp_path / "trial"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns(RUN))
    settings = (copied / "coterie.toml").read_text(encoding="utf-8")
    fewer = 'exchange_every = 5\nlocal_steps = 3\ncompress = "bf16"'
    settings = re.sub("exchange_every = 1\nlocal_steps = 1", fewer, settings)
    settings = re.sub("batch_size = 16", "batch_size = 40", settings)
    (copied / "coterie.toml").write_text(settings, encoding="utf-8")
    assert planned_gradients(lead_settings(copied)) == 12
    kits = [copied / "sites" / site for site in ("basel", "bern")]
    lead(copied, LocalSites({kit.name: peer_of(kit) for kit in kits}))
    record = coterie.Record.load(copied / RUN / "record.jsonl")
    assert (record.configuration.exchange_every, record.configuration.local_steps) == (5, 3)
    assert record.end.costs["basel"].gradients == 12
    assert record.end.traffic["basel"].messages == 4


def test_two_processes_do_not_lead_one_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.federation.lead.SECONDS_FOR_THE_LAST_ONE", 0.3)
    copied = tmp_path / "lead"
    shutil.copytree(folder, copied)
    with (
        claimed_elsewhere(copied / RUN) as child,
        pytest.raises(FileError, match=rf"in use by process {child} on"),
    ):
        lead(copied, LocalSites({}))


@needs_nvflare
def test_what_another_job_would_not_mend_is_told_and_what_it_would_is_not(
    folder: Path, tmp_path: Path
) -> None:
    """`federate run` submits a job again where it has ended without a word in its folder."""
    copied = shutil.copytree(folder, tmp_path / "trial", ignore=shutil.ignore_patterns(RUN))
    settings, refused = (copied / "coterie.toml").read_text(), copied / RUN / REFUSED
    sites = {kit.name: peer_of(kit) for kit in (copied / "sites").iterdir()}

    def lost(*_: Any, **__: Any) -> Any:
        raise PeerLost("NVFLARE has ended the job")

    ending = LocalSites(sites)
    ending.ask = lost  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        lead(copied, ending)
    assert not refused.exists()
    lead(copied, LocalSites(sites))
    (copied / "coterie.toml").write_text(settings.replace("seed = 0", "seed = 1"))
    with pytest.raises(CoterieError, match="of another run") as error:
        lead(copied, LocalSites(sites))
    assert refused.read_text() == str(error.value)


def test_rows_of_classes_that_user_0_does_not_know_are_left_out(
    folder: Path, tmp_path: Path
) -> None:
    kit = tmp_path / "bern"
    shutil.copytree(folder / "sites" / "bern", kit)
    preparation = Preparation.load(kit)
    dataclasses.replace(preparation, classes=(True,)).save(kit)
    known = int(pd.read_csv(kit / "data.csv")["ill"].sum())
    assert 0 < known < 40
    assert len(site_participant(kit, site_settings(kit)).user) == known
    dataclasses.replace(preparation, classes=("another",)).save(kit)
    with pytest.raises(DataError, match="a class that user 0 knows"):
        site_participant(kit, site_settings(kit))


@needs_nvflare
def test_user_0_prepares_its_rows_as_the_sites_were_told(folder: Path, tmp_path: Path) -> None:
    """Also where its table has changed since the sites got their folders."""
    older = patients().assign(age=patients()["age"] + 50)
    older.to_csv(tmp_path / "older.csv", index=False)
    before = lead_settings(folder)
    data = Data(table=str(tmp_path / "older.csv"), target="ill", own_examples=20)
    _, task = lead_participant(
        folder, LeadSettings(before.me, before.sites, data, before.model, before.training)
    )
    assert task is not None
    assert isinstance(task.me.examples, InMemory)
    # in the spreads of the rows that the sites know of
    assert float(task.me.examples.inputs[:, 0].mean()) > 3


def test_the_job_is_three_files_and_no_code(tmp_path: Path) -> None:
    files = [path for path in write_job(tmp_path, ["basel"]).rglob("*") if path.is_file()]
    names = ["config_fed_client.json", "config_fed_server.json", "meta.json"]
    assert sorted(path.name for path in files) == names


@needs_nvflare
def test_a_site_answers_user_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another site of the consortium gets no gradient, and uses up nothing of what the site gives."""
    from coterie.federation import jobs

    peer = Peer(
        coterie.User("a", torch.eye(2), torch.ones(2, 1)),
        Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss),
        Caps(gradients=1),
    )
    site = jobs.Site()
    site.responder = Responder(peer)
    request = {"points": np.zeros((1, 3), np.float32), "step": 0, "seed": 0, "batch_size": 2}
    for caller in ("neighbour", "Server", "server.x", ""):
        asked = SimpleNamespace(caller=caller, server=SimpleNamespace(name="server"))
        monkeypatch.setattr(jobs, "collab", asked)
        for method in METHODS:
            refused = site.answer(method, {"request": request})
            assert refused == {"refused": "it answers user 0 only"}
    monkeypatch.setattr(
        jobs, "collab", SimpleNamespace(caller="server", server=SimpleNamespace(name="server"))
    )
    told = {"willing": True, "left": 1, "size": 2, "examples": 1, "no_e_steps": ""}
    assert site.answer("ready", {}) == told
    letter = to_bytes({"method": "gradients", "arguments": {"request": request}})
    assert "gradients" in from_bytes(site.asked(letter))


@needs_nvflare
def test_a_column_that_is_dropped_is_not_told_to_the_sites(tmp_path: Path) -> None:
    patients().assign(patient=[f"P{i:04d}" for i in range(len(patients()))], name="Anna").to_csv(
        tmp_path / "mine.csv", index=False
    )
    words = [
        "federate",
        "init",
        str(tmp_path / "trial"),
        "--data",
        str(tmp_path / "mine.csv"),
        "--target",
        "ill",
    ]
    words += ["--server", "localhost", "--site", "basel", "--drop", "name", "--id", "patient"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    kit = json.loads(
        (tmp_path / "trial" / "sites" / "basel" / "kit.json").read_text(encoding="utf-8")
    )
    assert not {"patient", "name"} & set(kit["columns"])
    preparation = Preparation.load(tmp_path / "trial" / "sites" / "basel")
    assert not {"patient", "name"} & {*preparation.numeric, *preparation.categorical}
    assert lead_participant(tmp_path / "trial", lead_settings(tmp_path / "trial"))[1] is not None


@needs_nvflare
def test_what_was_started_is_ended_also_where_a_part_of_it_has_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    def look() -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("psutil.Process.children", lambda *_, **__: [SimpleNamespace(kill=gone)])
    before = signal.getsignal(signal.SIGTERM)
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    try:
        with pytest.raises(KeyboardInterrupt):
            run_process([sys.executable, "-c", script], tmp_path, lambda: look)
    finally:
        signal.signal(signal.SIGTERM, before)
    left = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert not psutil.pid_exists(left)
