"""Redis set-ups that tests start: a cluster, a replica with Sentinel, TLS, a proxy with faults."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import select
import socket
import ssl
import threading
import time

from kvtier.storage.errors import ConfigError
from kvtier.storage.redis_url import RedisSettings, parse_redis_url
from kvtier.tools.redis_server import RedisServer, free_port, server_binary


def eventually(check, limit_s=15.0):
    """Wait until ``check()`` is true."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        with contextlib.suppress(Exception):
            if check():
                return
        time.sleep(0.02)
    raise AssertionError(f"not within {limit_s} s")


def settings_of(url: str, **options) -> RedisSettings:
    """Settings for tests: small stripes, short time-outs."""
    options = {"stripe": 8192, "timeout": "1s", "connect_timeout": "1s", "prefix": "t", **options}
    return parse_redis_url(url, **options)


class Cluster:
    """Three nodes without replicas.

    Args:
        certificates: speak TLS too, as `make_certificates` made them; ConfigError where
            the server cannot.
    """

    def __init__(self, certificates: dict[str, str] | None = None) -> None:
        self.nodes: list[RedisServer] = []
        self._files = certificates
        self._tls_ports = [free_port() for _ in range(3)]
        binary = server_binary(("redis-server", "valkey-server")) if certificates else None
        for tls_port in self._tls_ports:
            self.nodes.append(
                RedisServer(
                    *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
                    *("--cluster-port", str(free_port()), "--cluster-node-timeout", "2000"),
                    *("--cluster-require-full-coverage", "no"),
                    *(tls_options(certificates, tls_port) if certificates else ()),
                    *(("--tls-cluster", "yes") if certificates else ()),
                    binary=binary,
                )
            )
        bounds = (0, 5461, 10923, 16384)
        first = self.nodes[0]
        for i, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
                if i:
                    bus = int(first.options[first.options.index("--cluster-port") + 1])
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
        for node in self.nodes:
            with node.client() as client:
                eventually(lambda client=client: self._whole(client))

    @staticmethod
    def _whole(client) -> bool:
        info = client.execute_command("CLUSTER", "INFO")
        text = (
            info
            if isinstance(info, dict)
            else dict(line.split(":") for line in info.decode().split())
        )
        return text["cluster_state"] == "ok" and int(text["cluster_slots_ok"]) == 16384

    @property
    def url(self) -> str:
        if self._files:
            return f"rediss+cluster://127.0.0.1:{self._tls_ports[0]}{tls_query(self._files)}"
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class Watched:
    """A master, its replica, and a Sentinel that makes the replica master when it dies."""

    def __init__(self) -> None:
        self.master = RedisServer()
        self.replica = RedisServer("--replicaof", "127.0.0.1", str(self.master.port))
        with self.replica.client() as client:
            eventually(lambda: client.info("replication")["master_link_status"] == "up")
        self.sentinel = Sentinel(self.master)
        with self.sentinel.client() as client:
            eventually(lambda: len(client.sentinel_slaves("main")) == 1)

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/main"

    def close(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.close()


class Sentinel(RedisServer):
    """One Sentinel, enough for itself."""

    def __init__(self, master: RedisServer) -> None:
        self._master = master
        super().__init__()

    def command_line(self) -> list[str]:
        path = os.path.join(self.folder, "sentinel.conf")
        if not os.path.exists(path):
            with open(path, "w") as out:
                out.write(
                    f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n"
                    f"unixsocket {self.socket_path}\n"
                    f"sentinel monitor main 127.0.0.1 {self._master.port} 1\n"
                    "sentinel down-after-milliseconds main 300\n"
                    "sentinel failover-timeout main 2000\n"
                )
        return [self.binary, path, "--sentinel"]


def make_certificates(folder: str) -> dict[str, str]:
    """Make an authority, a server's certificate for 127.0.0.1 and a client's; return paths."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = dt.datetime.now(dt.timezone.utc)

    def name(text):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def usage(signs):
        return x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=signs,
            crl_sign=signs,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    def make(text, issuer=None, issuer_key=None):
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(text))
            .issuer_name(name(issuer or text))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=12))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), True)
            # What Python 3.13 insists on (X.509 strict).
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    (issuer_key or key).public_key()
                ),
                False,
            )
            .add_extension(usage(signs=issuer is None), True)
        )
        if issuer:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), False)
        signed = builder.sign(issuer_key or key, hashes.SHA256())
        paths = {}
        for kind, data in (
            ("cert", signed.public_bytes(serialization.Encoding.PEM)),
            ("key", key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )),
        ):  # fmt: skip
            paths[kind] = os.path.join(folder, f"{text}.{kind}")
            with open(paths[kind], "wb") as out:
                out.write(data)
        return paths, key

    ca, ca_key = make("authority")
    server, _ = make("server", "authority", ca_key)
    client, _ = make("client", "authority", ca_key)
    return {
        "ca": ca["cert"],
        "server_cert": server["cert"],
        "server_key": server["key"],
        "client_cert": client["cert"],
        "client_key": client["key"],
    }


def tls_options(files: dict[str, str], port: int) -> list[str]:
    """Options that let a server speak TLS on ``port`` to who has a client certificate."""
    return [
        *("--tls-port", str(port), "--tls-cert-file", files["server_cert"]),
        *("--tls-key-file", files["server_key"], "--tls-ca-cert-file", files["ca"]),
    ]


def tls_query(files: dict[str, str]) -> str:
    """The part of a URL that names authority, client certificate and key."""
    return f"?tls_ca={files['ca']}&tls_cert={files['client_cert']}&tls_key={files['client_key']}"


class Proxy:
    """Stands before a server; ``fault`` is how it treats what passes.

    * "none": passes everything on;
    * "silent": accepts and says nothing;
    * "slow": every answer is ``delay_s`` late;
    * "cut": closes after ``cut_bytes`` of answers.

    With ``context`` it speaks TLS to its clients.
    """

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._to = port
        self._context = context
        self.fault = "none"
        self.delay_s = 0.0
        self.cut_bytes = 1 << 60
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis{'s' if self._context else ''}://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            front = stack.enter_context(raw)
            if self._context:
                front = stack.enter_context(self._context.wrap_socket(raw, server_side=True))
                self._socks.append(front)
            back = stack.enter_context(socket.create_connection(("127.0.0.1", self._to)))
            self._socks.append(back)
            answered = 0
            while True:
                ready = [front] if self._context and front.pending() else []
                ready = ready or select.select([front, back], [], [])[0]
                for sock in ready:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    if self.fault == "silent":
                        continue
                    if sock is front:
                        back.sendall(data)
                        continue
                    if self.fault == "slow":
                        time.sleep(self.delay_s)
                    if self.fault == "cut":
                        data = data[: max(self.cut_bytes - answered, 0)]
                    answered += len(data)
                    front.sendall(data)
                    if self.fault == "cut" and answered >= self.cut_bytes:
                        return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for sock in self._socks:
            sock.close()


class TlsServer:
    """A server that speaks TLS and wants a client certificate: itself, or behind a terminator."""

    def __init__(self, certificates: dict[str, str]) -> None:
        self._files = certificates
        self._proxy: Proxy | None = None
        try:
            self.server = RedisServer(
                *tls_options(certificates, tls_port := free_port()),
                binary=server_binary(("redis-server", "valkey-server")),
            )
            self.port = tls_port
        except ConfigError:  # this build has no TLS
            self.server = RedisServer()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates["server_cert"], certificates["server_key"])
            context.load_verify_locations(certificates["ca"])
            context.verify_mode = ssl.CERT_REQUIRED
            self._proxy = Proxy(self.server.port, context)
            self.port = self._proxy.port

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}{tls_query(self._files)}"

    def close(self) -> None:
        if self._proxy:
            self._proxy.close()
        self.server.close()
