"""Certificates, keys, passwords and the token are loaded again when their files change."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from support.operating import call, reloads, running, until_reloads, write
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import TIMEOUT_S, RawClient, api_versions
from support.tier import TierMachine, tier_config, until_shared

from examples.devkit.broker import EmbeddedBroker
from proxy.relay.tls import not_after

NOTICED_WITHIN_S = 10
QUOTA = "/v1/quotas/client-id=etl"
EXPIRES = datetime(2031, 5, 1, 12, tzinfo=UTC)


class Pair:
    """A certificate and its key in a folder, as an operator or kubelet replaces them."""

    def __init__(self, authority: trustme.CA, folder: Path) -> None:
        folder.mkdir()
        self._authority = authority
        self._issued = 0
        self.cert_file, self.key_file = folder / "tls.crt", folder / "tls.key"
        self.renew()

    @property
    def section(self) -> dict[str, str]:
        return {"cert_file": str(self.cert_file), "key_file": str(self.key_file)}

    def issue(self) -> tuple[bytes, bytes]:
        """Return a new certificate, of another day, and its key."""
        self._issued += 1
        end = EXPIRES + timedelta(days=self._issued)
        made = self._authority.issue_cert(HOST, common_name="proxy", not_after=end)
        return made.cert_chain_pems[0].bytes(), made.private_key_pem.bytes()

    def renew(self) -> None:
        cert, key = self.issue()
        self.cert_file.write_bytes(cert)
        self.key_file.write_bytes(key)


class MountedPair(Pair):
    """Behind a link to a folder that is replaced, as in a volume of Kubernetes."""

    def renew(self) -> None:
        folder = self.cert_file.parent
        data = folder / f"..{self._issued}"
        data.mkdir()
        for file, content in zip((self.cert_file, self.key_file), self.issue(), strict=True):
            (data / file.name).write_bytes(content)
            if not file.is_symlink():
                file.symlink_to(Path("..data") / file.name)
        new = folder / "..data_tmp"
        new.symlink_to(data.name)
        new.replace(folder / "..data")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=[Pair, MountedPair])
def pair(request: pytest.FixtureRequest, authority: trustme.CA, tmp_path: Path) -> Pair:
    made: Pair = request.param(authority, tmp_path / "pair")
    return made


Shown = Callable[[ProxyProcess], bytes]


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def shown(process: ProxyProcess, context: ssl.SSLContext) -> bytes:
    """Return the certificate that a new client is shown."""
    with RawClient(process.bootstrap, tls=context) as client:
        assert isinstance(client.sock, ssl.SSLSocket)
        return client.sock.getpeercert(binary_form=True) or b""


def in_file(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert_file.read_text())


def listed(process: ProxyProcess) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(process.get("/v1/status")[1])["certificates"]
    return found


def test_clients_are_shown_the_new_certificate(
    kafka: EmbeddedBroker, tmp_path: Path, pair: Pair, trusting: ssl.SSLContext
) -> None:
    settings = config(kafka.bootstrap, listeners=[{"tls": pair.section}])
    with (
        running(ProxyProcess(settings, tmp_path)) as process,
        RawClient(process.bootstrap, tls=trusting) as connected,
    ):
        for count in (1, 2):
            assert shown(process, trusting) == in_file(pair)
            pair.renew()
            until(lambda: shown(process, trusting) == in_file(pair), "shown", NOTICED_WITHIN_S)
            (certificate,) = listed(process)
            end = datetime.fromtimestamp(not_after(pair.cert_file), UTC)
            assert certificate == {
                "section": "listeners 'default'",
                "file": str(pair.cert_file),
                "not_after": end.isoformat(timespec="seconds"),
            }
            assert end == EXPIRES + timedelta(days=count + 1)
            assert connected.ask(api_versions(3)).error_code == 0
        until_reloads(process, ok=2, failed=0)


@pytest.mark.parametrize("key_first", [False, True])
def test_the_old_pair_stays_until_the_new_one_is_whole(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    authority: trustme.CA,
    trusting: ssl.SSLContext,
    key_first: bool,
) -> None:
    pair = Pair(authority, tmp_path / "pair")
    settings = config(kafka.bootstrap, listeners=[{"tls": pair.section}])
    with running(ProxyProcess(settings, tmp_path)) as process:
        before = shown(process, trusting)
        steps = list(zip((pair.cert_file, pair.key_file), pair.issue(), strict=True))
        first, second = reversed(steps) if key_first else steps
        first[0].write_bytes(first[1])
        until(lambda: reloads(process)["failed"] == 1, "refused", NOTICED_WITHIN_S)
        (line,) = process.logged("configuration not reloaded, the old one stays")
        assert "listeners[0].tls.key_file: " in line["problems"]
        assert "fix: name the key that this certificate was made with" in line["problems"]
        assert shown(process, trusting) == before
        second[0].write_bytes(second[1])
        until(lambda: shown(process, trusting) == in_file(pair), "shown", NOTICED_WITHIN_S)
        assert in_file(pair) != before
        until_reloads(process, ok=1, failed=1)


def test_a_bad_file_changes_nothing(
    kafka: EmbeddedBroker, tmp_path: Path, authority: trustme.CA, trusting: ssl.SSLContext
) -> None:
    pair = Pair(authority, tmp_path / "pair")
    settings = config(kafka.bootstrap, listeners=[{"tls": pair.section}])
    with running(ProxyProcess(settings, tmp_path)) as process:
        before = shown(process, trusting)
        for count, spoil in enumerate((b"", b"garbage", None), 1):
            if spoil is None:
                pair.cert_file.unlink()
            else:
                pair.cert_file.write_bytes(spoil)
            until(lambda: reloads(process)["failed"] == count, "refused", NOTICED_WITHIN_S)  # noqa: B023
            assert shown(process, trusting) == before
        lines = process.logged("configuration not reloaded, the old one stays", 3)
        for line in lines:
            assert "tls.cert_file: " in line["problems"]
            assert "fix: " in line["problems"]


def test_client_certificates_of_another_authority(
    kafka: EmbeddedBroker, tmp_path: Path, authority: trustme.CA
) -> None:
    pair, other = Pair(authority, tmp_path / "pair"), trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    other.issue_cert("client@example").configure_cert(context)
    settings = config(
        kafka.bootstrap, listeners=[{"tls": {**pair.section, "ca_file": str(ca_file)}}]
    )

    def is_let_in() -> bool:
        try:
            with RawClient(process.bootstrap, tls=context) as client:
                return client.ask(api_versions(3)).error_code == 0
        except (ssl.SSLError, ConnectionError):
            return False

    with running(ProxyProcess(settings, tmp_path)) as process:
        assert not is_let_in()
        other.cert_pem.write_to_path(str(ca_file))
        until(is_let_in, "it is let in", NOTICED_WITHIN_S)


@pytest.fixture
def broker(authority: trustme.CA) -> Iterator[tuple[int, list[bytes]]]:
    """The port of what asks for certificates as a broker does, and those that it was shown."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    certificates: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            sock.settimeout(TIMEOUT_S)
            with context.wrap_socket(sock, server_side=True) as secured:
                certificates.append(secured.getpeercert(binary_form=True) or b"")

    with socket.create_server((HOST, 0)) as server:
        serving = threading.Thread(target=serve)
        serving.start()
        yield server.getsockname()[1], certificates
        server.shutdown(socket.SHUT_RDWR)
        serving.join(TIMEOUT_S)


def test_brokers_are_shown_the_new_certificate(
    broker: tuple[int, list[bytes]], tmp_path: Path, authority: trustme.CA
) -> None:
    port, certificates = broker
    pair = Pair(authority, tmp_path / "pair")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = {"ca_file": str(tmp_path / "ca.pem"), **pair.section}
    with running(ProxyProcess(config(f"{HOST}:{port}", cluster_tls=tls), tmp_path)) as process:
        for _ in range(2):
            until(lambda: in_file(pair) in certificates, "shown", NOTICED_WITHIN_S)
            pair.renew()
        assert [each["section"] for each in listed(process)] == ["cluster.tls", "cluster.tls"]


def test_the_token(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first\n")
    settings = config(kafka.bootstrap)
    settings["admin"]["token_file"] = str(token_file)
    with running(ProxyProcess(settings, tmp_path)) as process:
        assert call(process, "DELETE", QUOTA, token="first").status == 404
        token_file.write_text("second\n")
        until(
            lambda: call(process, "DELETE", QUOTA, token="second").status == 404,
            "it counts",
            NOTICED_WITHIN_S,
        )
        assert call(process, "DELETE", QUOTA, token="first").status == 401
        token_file.write_text("\n")
        until(lambda: reloads(process)["failed"] == 1, "refused", NOTICED_WITHIN_S)
        assert call(process, "DELETE", QUOTA, token="second").status == 404


def test_members_show_each_other_the_new_token(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first\n")
    machines = []
    for name in ("a", "b"):
        settings = tier_config(kafka.bootstrap, "renewed", name)
        settings["admin"]["token_file"] = str(token_file)
        machines.append(TierMachine(settings, tmp_path / name))

    def is_answered(token: str) -> bool:
        """Return whether each takes the token, and the leader that of the other."""
        answers = [call(each, "DELETE", QUOTA, token=token) for each in machines]
        return [each.status for each in answers] == [404, 404]

    with running(machines[0]), running(machines[1]):
        until_shared(*machines)
        assert is_answered("first")
        token_file.write_text("second\n")
        until(lambda: is_answered("second"), "the second token counts", NOTICED_WITHIN_S)


def test_other_tokens_wait_for_a_restart(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    token_file, other_file = tmp_path / "token", tmp_path / "other"
    token_file.write_text("first\n")
    other_file.write_text("other\n")
    settings = config(kafka.bootstrap)
    without = dict(settings["admin"])
    settings["admin"]["token_file"] = str(token_file)
    other = {"name": "ops", "token_file": str(other_file), "rights": ["quotas"]}
    with running(ProxyProcess(settings, tmp_path)) as process:
        for number, admin in enumerate(({**without, "tokens": [other]}, without), 1):
            write(process, {**settings, "admin": admin})
            until(lambda: sum(reloads(process).values()) == number, "loaded", NOTICED_WITHIN_S)  # noqa: B023
            assert reloads(process)["failed"] == 0
            assert call(process, "DELETE", QUOTA, token="first").status == 404
            assert call(process, "DELETE", QUOTA, token="other").status == 401
            assert call(process, "DELETE", QUOTA).status == 401
        (newest, *_) = json.loads(process.get("/v1/status")[1])["config_loads"]
        assert newest["message"] == "after a restart: admin"
