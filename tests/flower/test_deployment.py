"""A deployment on loopback: SuperLink with TLS, four SuperNodes with registered keys, and things that go wrong.

One federation goes through all of it, in this order, since starting one takes longer than any of its parts: a
SuperNode is killed in the middle of round 1; a stranger is turned away; the ServerApp is killed in round 3; a node
restarts; a second ServerApp goes on; another app asks the nodes again.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedentopt import EntropySelector
from fedentopt.datasets import load
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.flower.register_files import RegisterFiles
from fedentopt.results.reading import find_runs
from flower_processes import Programs, command_of, descendants, free_port, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

TESTS = Path(__file__).parent.parent
TEST_APP = TESTS / "support" / "flower_test_app"
EXAMPLE_APP = TESTS.parent / "examples" / "flower-app"
NODES = 4
PATIENCE = 180.0


def make_certificates(folder: Path) -> None:
    """A CA, and a certificate of its for 127.0.0.1."""
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "superlink")])

    def build(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(ca).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number()).not_valid_before(begin)
        return made.not_valid_after(begin + datetime.timedelta(days=1))

    ca_made = build(ca, ca_key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server_made = build(server, server_key).add_extension(names, critical=False)
    for name, certificate in (("ca.crt", ca_made), ("server.pem", server_made)):
        (folder / name).write_bytes(certificate.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(_private(server_key, serialization.PrivateFormat.PKCS8))


def make_key(path: Path) -> None:
    """What `ssh-keygen -t ecdsa -b 384` makes."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


@dataclass
class Federation:
    """The SuperLink, the SuperNodes, and the files they work with."""

    programs: Programs
    superlink: subprocess.Popen[bytes]
    port: int
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    stranger: subprocess.Popen[bytes] = field(init=False)

    @property
    def folder(self) -> Path:
        return self.programs.folder

    def supernode(self, name: str, key: Path, config: str = "") -> subprocess.Popen[bytes]:
        return self.programs.start(
            name, "flower-supernode", "--root-certificates", self.folder / "ca.crt",
            "--superlink", f"127.0.0.1:{self.port}", "--auth-supernode-private-key", key,
            "--port", str(free_port()), "--max-retries", "5", *(["--node-config", config] if config else []),
        )  # fmt: skip

    def start_node(self, client: int, name: str = "") -> None:
        config = (
            f'client-id={client} data="{self.folder / f"data{client}.npz"}" label-epsilon=0.5 '
            f'class-names="{",".join(load("digits").class_names)}" '
            f'label-report-file="{self.folder / f"report{client}.json"}" label-ledger="{self.folder / "ledger"}"'
        )
        self.nodes[client] = self.supernode(name or f"node{client}", self.folder / f"key{client}", config)

    def wait_for_node(self, client: int, name: str = "") -> None:
        log = name or f"node{client}"
        wait_for(log, lambda: "SuperNode ID" in self.programs.log(log), PATIENCE, self.nodes[client])

    def run(self, app: Path, config: str) -> None:
        self.programs.call("flwr", "run", app, "test", "--run-config", config)

    def listed(self) -> list[dict[str, Any]]:
        """The nodes the SuperLink has admitted, online or not."""
        told = json.loads(self.programs.call("flwr", "supernode", "ls", "test", "--format", "json"))
        return list(told["nodes"])

    def online(self) -> set[int]:
        """The ids of those that are online."""
        return {int(node["node-id"]) for node in self.listed() if node["status"] == "online"}

    def serverapp(self) -> int:
        """The id of the ServerApp's process."""
        running = [pid for pid in descendants(self.superlink.pid) if "flwr-serverapp" in command_of(pid)]
        assert len(running) == 1, running
        return running[0]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    make_certificates(folder)
    data = load("digits")
    for client in range(NODES):
        make_key(folder / f"key{client}")
        # Halves of the digits, by value: clients 0 and 2 hold 0 to 4, clients 1 and 3 hold 5 to 9.
        mine = np.flatnonzero((data.y_train >= 5) == bool(client % 2))[client // 2 :: 2][:200]
        np.savez(
            folder / f"data{client}.npz", x_train=data.x_train[mine], y_train=data.y_train[mine],
            x_test=data.x_test[:1], y_test=data.y_test[:1], class_names=np.array(data.class_names),
        )  # fmt: skip
    with Programs(folder, FEDENTOPT_DATA=str(folder / "cache")) as programs:
        settings = f'root-certificates = "{folder / "ca.crt"}"'
        superlink, port = programs.superlink(
            settings, "--ssl-ca-certfile", folder / "ca.crt", "--ssl-certfile", folder / "server.pem",
            "--ssl-keyfile", folder / "server.key", "--enable-supernode-auth", "--database", folder / "state.db",
        )  # fmt: skip
        made = Federation(programs, superlink, port)
        keys = [folder / f"key{client}.pub" for client in range(NODES)]
        registering = [
            programs.start(f"register-{key.stem}", "flwr", "supernode", "register", key, "test") for key in keys
        ]
        for process in registering:
            assert process.wait(timeout=PATIENCE) == 0
        make_key(folder / "stranger")
        made.stranger = made.supernode("stranger", folder / "stranger")
        for client in range(NODES):
            made.start_node(client)
        for client in range(NODES):
            made.wait_for_node(client)
        yield made


def rounds(traces: Path) -> list[dict[str, Any]]:
    """The lines the ServerApp left, one a finished round."""
    path = traces / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reported(traces: Path) -> dict[int, dict[str, Any]]:
    """What the server knows of each client, from its checkpoint."""
    found = checkpoints.load(traces / "checkpoint")
    assert found is not None
    members = RegisterFiles(traces / "checkpoint").load(found.meta["clients"], 10)
    return {
        int(client): {"node": m.node_id, "counts": m.report.counts.tolist(), "epsilon": m.report.epsilon}
        for client, m in members.items()
    }


def test_a_federation_survives_dead_nodes_a_dead_serverapp_and_being_asked_again(federation: Federation) -> None:
    folder, programs, superlink = federation.folder, federation.programs, federation.superlink
    traces = folder / "traces"
    traces.mkdir()

    # Round 1: the client that was picked second dies in the middle of its training; the round ends with the rest.
    federation.run(TEST_APP, f'traces="{traces}" held-rounds="1,3" round-timeout=40.0 min-nodes=3')
    wait_for("training in round 1", lambda: len(list(traces.glob("training-*-1"))) == 2, PATIENCE, superlink)
    reports = [json.loads((folder / f"report{k}.json").read_text())["clients"][str(k)][0] for k in range(NODES)]
    selector = EntropySelector(2, 2, seed=1)
    selector.register(np.array([report["counts"] for report in reports]), noisy=True)
    expected = list(selector.select().clients)
    victim = int(expected[1])
    programs.end([federation.nodes[victim]], signal.SIGKILL)
    (traces / "go-on-1").touch()

    # Meanwhile: a SuperNode whose key is not registered was turned away.
    assert federation.stranger.wait(timeout=PATIENCE) != 0
    assert "Failed to activate SuperNode" in programs.log("stranger")
    assert len(federation.listed()) == NODES

    wait_for("end of round 1", lambda: len(rounds(traces)) >= 1, PATIENCE, superlink)
    first = rounds(traces)[0]
    assert first["clients"] == expected
    assert first["answered"] == expected[:1]
    assert list(first["failed"]) == [str(victim)]
    assert first["weight"] == 1.0

    # Round 3: the ServerApp is killed in the middle.
    wait_for("training in round 3", lambda: len(list(traces.glob("training-*-3"))) >= 1, PATIENCE, superlink)
    os.kill(federation.serverapp(), signal.SIGKILL)
    (traces / "go-on-3").touch()
    assert rounds(traces)[1]["clients"] == list(selector.select().clients)
    assert rounds(traces)[1]["weight"] == 2.0
    known = reported(traces)
    assert sorted(known) == list(range(NODES))
    for client, report in enumerate(reports):
        assert known[client]["counts"] == report["counts"]
        assert known[client]["epsilon"] == 0.5  # the owner's: the app asked for 2.0

    # A node restarts under its registered key: it is the same node, so nobody has to be asked.
    restarted = next(client for client in range(NODES) if client != victim)
    programs.end([federation.nodes[restarted]], signal.SIGTERM)
    wait_for("its going offline", lambda: known[restarted]["node"] not in federation.online(), PATIENCE)
    federation.start_node(restarted, "restarted")
    federation.wait_for_node(restarted, "restarted")
    there = {known[client]["node"] for client in range(NODES) if client != victim}
    wait_for("the victim's going offline and the other's return", lambda: federation.online() == there, PATIENCE)
    for path in traces.glob("asked-*"):
        path.unlink()

    # A second ServerApp goes on with round 3: same buffer, same model, no questions.
    federation.run(TEST_APP, f'traces="{traces}" min-nodes=3')
    wait_for("end of the second run", lambda: (traces / "finished").exists(), PATIENCE, superlink)
    assert [line["round"] for line in rounds(traces)] == [1, 2, 3]
    here = [client for client in range(NODES) if client != victim]
    assert rounds(traces)[2]["clients"] == list(selector.select(available=here).clients)
    assert rounds(traces)[2]["weight"] == 3.0, rounds(traces)[2]
    assert list(traces.glob("asked-*")) == []

    # Another app, another run, the nodes' own data: asked again, the nodes give the same bytes.
    names = ",".join(load("digits").class_names)
    federation.run(
        EXAMPLE_APP,
        f'clients={NODES} min-nodes=3 cohort="2" buffer="1" rounds=1 epochs=1 class-names="{names}" label-epsilon=2.0 '
        f'out="{folder / "out"}" checkpoint="{folder / "again" / "checkpoint"}"',
    )
    wait_for("results of the example app", lambda: bool(find_runs(folder / "out")), PATIENCE, superlink)
    again = reported(folder / "again")
    assert sorted(again) == here
    for client in here:
        assert np.array(again[client]["counts"]).tobytes() == np.array(known[client]["counts"]).tobytes()
    (run,) = find_runs(folder / "out")
    assert len(run.records[0].trained) == 2
