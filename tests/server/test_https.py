"""HTTPS, certificates of clients, and pages of other origins (CORS), on one server."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import openai
import pytest

from forkpoint.cli.main import main
from forkpoint.errors import ConfigError
from forkpoint.server.config import ServerConfig
from forkpoint.server.listener import tls_context
from tests.server.running import RunningServer
from tests.server.test_connections import connect, read_all, server_with_few_files

FILES = Path(__file__).parent / "tls"  # a certificate that signs itself, for 127.0.0.1, valid for a century
CERTIFICATE, KEY = str(FILES / "server.pem"), str(FILES / "server.key")
ORIGIN = "https://chat.example.org"


@pytest.fixture(scope="module")
def secure(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY, "--ssl-ca-certs", CERTIFICATE, "--api-key", "k"]
    flags += ["--allowed-origins", ORIGIN, "--served-model-name", "tiny", "--max-model-len", "512"]
    with server_with_few_files(tiny_model, tmp_path_factory.mktemp("secure"), *flags) as running:
        yield running
        check_that_an_idle_client_is_no_error_at_the_end(running)


def check_that_an_idle_client_is_no_error_at_the_end(running: RunningServer) -> None:
    """It does not answer the end of TLS, so uvicorn waits for its connection and gives up."""
    with connect(running) as plain, client_context().wrap_socket(plain, server_hostname="127.0.0.1") as idle:
        idle.sendall(b"GET /version HTTP/1.1\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert running.stop() == 0
    assert running.log.splitlines()[-1].endswith("stopped") and "ERROR" not in running.log, running.log


@pytest.fixture
def https(secure: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=secure.url, verify=client_context(), timeout=30) as client:
        yield client


def client_context(*, shows_certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CERTIFICATE)
    if shows_certificate:
        context.load_cert_chain(CERTIFICATE, KEY)
    return context


def test_the_openai_client_streams_over_https(secure: RunningServer, https: httpx2.Client) -> None:
    assert secure.url.startswith("https://")
    client = openai.OpenAI(base_url=f"{secure.url}/v1", api_key="k", http_client=https)  # type: ignore[arg-type]
    chunks = list(client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_clients_without_a_certificate_and_without_https_are_turned_away(secure: RunningServer) -> None:
    for verify in (client_context(shows_certificate=False), ssl.create_default_context()):
        with httpx2.Client(verify=verify) as client, pytest.raises(httpx2.TransportError):
            client.get(f"{secure.url}/health")
    with pytest.raises(httpx2.TransportError):
        httpx2.get(secure.url.replace("https", "http") + "/health")


def test_clients_that_begin_no_handshake_give_way_too(secure: RunningServer, https: httpx2.Client) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(secure))
        assert https.get("/health").status_code == 200
        assert "limit of open files" in secure.log
        silent = stack.enter_context(connect(secure))
        assert not read_all(silent), "it is closed, for it has not begun in time"
        assert "Traceback" not in secure.log


def test_forkpoints_own_client_trusts_what_the_environment_names(
    secure: RunningServer, http: httpx2.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["complete", "--prompt", "x", "--url"]
    assert main([*arguments, secure.url]) == main([*arguments, str(http.base_url).replace("http", "https")]) == 2
    untrusted, plain = capsys.readouterr().err.splitlines()
    assert untrusted.startswith("error: the certificate of") and "SSL_CERT_FILE" in untrusted
    assert " does not speak HTTPS (" in plain
    environment = {**os.environ, "SSL_CERT_FILE": CERTIFICATE}
    command = [sys.executable, "-m", "forkpoint", *arguments, secure.url]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert shown.returncode == 2 and "broke off" in shown.stderr  # for the server misses a certificate


def test_a_page_of_an_allowed_origin_may_ask_and_read(https: httpx2.Client) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    reply = https.options("/v1/chat/completions", headers=asked)  # browsers ask without a key
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = https.get("/v1/models", headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    answer = https.get("/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer k"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_may_not(https: httpx2.Client) -> None:
    asked = {"Origin": "https://evil.example.org", "Access-Control-Request-Method": "POST"}
    assert https.options("/v1/chat/completions", headers=asked).status_code == 400
    answer = https.get("/version", headers={"Origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in answer.headers


def test_without_allowed_origins_nothing_is_allowed(http: httpx2.Client) -> None:
    answer = http.get("/version", headers={"Origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ssl_certfile": "/nowhere.pem"}, "No such file or directory"),
        ({"ssl_certfile": CERTIFICATE}, "give PEM files of a certificate and its key"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": __file__}, "ssl_keyfile"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": str(FILES / "encrypted.key")}, "without a password"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": KEY}, "ssl_ca_certs="),
        ({"ssl_keyfile": KEY}, "together with ssl_certfile"),
    ],
)
def test_wrong_files_are_named(files: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tls_context(ServerConfig(**files))  # type: ignore[arg-type]


def test_one_file_may_hold_key_and_certificate(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(CERTIFICATE).read_text() + Path(KEY).read_text())
    context = tls_context(ServerConfig(ssl_certfile=str(both)))
    assert context is not None and context.verify_mode == ssl.CERT_NONE
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allowed_origins": ("chat.example.org",)}, "without a path"),
        ({"allowed_origins": ("https://chat.example.org/",)}, "without a path"),
        ({"allowed_origins": ("[1]",)}, "one JSON list of texts"),
        ({"allowed_origins": ("[",)}, "one JSON list of texts"),
        ({"allowed_origins": ("[" * 100_000,)}, "one JSON list of texts"),
        ({"allow_credentials": True}, "allowed_origins too"),
    ],
)
def test_wrong_origins_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**options)  # type: ignore[arg-type]


def test_lists_are_taken_as_vllm_takes_them() -> None:
    config = ServerConfig(allowed_origins=('["*", "http://a.example:1"]',), allowed_methods=("GET", "POST"))
    assert config.allowed_origins == ("*", "http://a.example:1") and config.allowed_methods == ("GET", "POST")
