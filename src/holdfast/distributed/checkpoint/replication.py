"""Transfers files of the memory tier between hosts: every rank has a server, and sends requests to those of others.

A connection carries one request: a line of JSON with the token of the rank that accepts it, and the bytes that it sends.
The answer is a line of JSON, and the bytes that were asked for. Without the token there is no answer.
Everything on a connection has one time limit, and `close` ends all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import FileSum
from holdfast.core.checkpoints.verify import CHECKSUMS
from holdfast.distributed.notices import Text

log = logging.getLogger("holdfast")

CONNECT_SECONDS = 5.0
HELLO_SECONDS = 5.0
"""in which a connection must have sent its first line"""
MAX_SMALL_BYTES = 32 << 20
"""of what is received into memory: notes, and the manifest with the health of a state"""
_MAX_LINE_BYTES = 16 << 10
_MAX_CONNECTIONS = 64
_CHUNK = 1 << 20

T = TypeVar("T")
Action = Literal["put", "publish", "remove", "get"]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class Peer(msgspec.Struct, frozen=True):
    """Where a rank accepts requests, and the token that it expects."""

    rank: int
    host: Text
    address: Text
    port: int
    token: Text


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank asks of another: to take a file of a state that is being written, publish the state, remove it, or send a
    file of it."""

    token: Text
    action: Action
    state: Text
    file: Text = ""
    bytes: NonNegative = 0
    """that follow the request"""
    sum: Text = ""


class _Answer(msgspec.Struct, frozen=True):
    """What became of a request."""

    problem: Text = ""
    bytes: NonNegative = 0
    """that follow the answer"""


class Transfer:
    """One connection. TimeoutError, which is an OSError, if everything on it takes longer than its time limit."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.unread = 0
        """bytes that the other side has announced and this one has not received"""
        self.set_limit(seconds)

    def set_limit(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def read_line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            if len(line) > _MAX_LINE_BYTES:
                raise OSError(f"the first line has more than {_MAX_LINE_BYTES} bytes")
            line += self._receive(1)
        return bytes(line)

    def receive_bytes(self) -> bytes:
        """Return the announced bytes."""
        if self.unread > MAX_SMALL_BYTES:
            raise OSError(f"{self.unread:,} bytes are more than {MAX_SMALL_BYTES:,}")
        content = bytearray()
        while self.unread:
            content += self._read_chunk()
        return bytes(content)

    def receive_file(self, path: Path, expected: FileSum) -> None:
        """Write the announced bytes to `path`, which appears when it is complete. RunDirError if the checksum differs."""
        algorithm = expected.sum.partition(":")[0]
        if algorithm not in CHECKSUMS or self.unread != expected.bytes:
            raise RunDirError(f"{path.name} has {self.unread:,} bytes and should have {expected.bytes:,}")
        temporary, checksum = path.with_name(f".{path.name}.{os.urandom(4).hex()}.aside"), CHECKSUMS[algorithm]()
        descriptor = durable.create_file(temporary)
        try:
            try:
                while self.unread:
                    chunk = self._read_chunk()
                    checksum.update(chunk)
                    durable.write_all(descriptor, chunk)
            finally:
                durable.close(descriptor)
            actual = f"{algorithm}:{checksum.hexdigest()}"
            if actual != expected.sum:
                raise RunDirError(f"{path.name} arrived with checksum {actual} instead of {expected.sum[:80]}")
            durable.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                durable.remove_tree(temporary)
            raise

    def drain(self) -> None:
        """Receive the rest of the announced bytes: the other side reads no answer before it has sent them."""
        while self.unread:
            self._read_chunk()

    def send(self, message: msgspec.Struct, content: bytes | Path = b"") -> None:
        """Send a line, and the bytes or the file that it announces."""
        self._set_timeout()
        self._connection.sendall(msgspec.json.encode(message) + b"\n")
        if isinstance(content, bytes):
            self._set_timeout()
            self._connection.sendall(content)
            return
        with os.fdopen(durable.open_regular(content), "rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left:
                self._set_timeout()
                if (sent := self._connection.sendfile(file, file.tell(), min(left, _CHUNK))) == 0:
                    raise OSError(f"{content} has become shorter")
                left -= sent

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self._connection.close()

    def _read_chunk(self) -> bytes:
        chunk = self._receive(min(self.unread, _CHUNK))
        self.unread -= len(chunk)
        return chunk

    def _receive(self, count: int) -> bytes:
        self._set_timeout()
        if not (content := self._connection.recv(count)):
            raise OSError("the connection was closed")
        return content

    def _set_timeout(self) -> None:
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError("it took too long")
        self._connection.settimeout(left)


Handler = Callable[[Request, Transfer], Path | None]
"""carries out a request; returns a file to send. RunDirError and OSError become the answer."""


class FileExchange:
    """The server of this rank, and the requests that it sends. Any thread may send."""

    def __init__(self, rank: int, host: str, handle: Handler, seconds: float) -> None:
        self.local = Peer(rank, host[:200], "", 0, secrets.token_hex(16))
        self._handle, self._seconds = handle, seconds
        self._listener: socket.socket | None = None
        self._transfers: set[Transfer] = set()
        self._slots = threading.Semaphore(_MAX_CONNECTIONS)
        self._is_closed = False

    def listen(self, family: socket.AddressFamily, address: str) -> None:
        """Accept connections at an address of this machine. OSError if that is not possible."""
        self._listener = socket.create_server((address, 0), family=family)
        self.local = msgspec.structs.replace(self.local, address=address, port=self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), name="holdfast-replicas", daemon=True).start()

    def send(
        self,
        peer: Peer,
        action: Action,
        state: str,
        seconds: float,
        file: str = "",
        content: bytes | Path = b"",
        *,
        sums: FileSum | None = None,
    ) -> None:
        """Have another rank do something, with bytes or a file. RunDirError, with its host, if it does not."""
        if isinstance(content, bytes):
            sums = FileSum(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
        assert sums is not None
        request = Request(token=peer.token, action=action, state=state, file=file, bytes=sums.bytes, sum=sums.sum)
        self._exchange(peer, request, seconds, content, Transfer.drain)

    def get_file(self, peer: Peer, state: str, path: Path, expected: FileSum, seconds: float) -> None:
        """Fetch the file of that name. RunDirError if it does not arrive with its checksum."""
        request = Request(token=peer.token, action="get", state=state, file=path.name)
        self._exchange(peer, request, seconds, b"", lambda transfer: transfer.receive_file(path, expected))

    def get_bytes(self, peer: Peer, state: str, file: str, seconds: float) -> bytes:
        """Return the content of a small file. RunDirError if it does not arrive."""
        request = Request(token=peer.token, action="get", state=state, file=file)
        return self._exchange(peer, request, seconds, b"", Transfer.receive_bytes)

    def close(self) -> None:
        """End the server and every transfer. Threads that wait for one get an error."""
        self._is_closed = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._slots.release()
        for transfer in list(self._transfers):
            transfer.close()

    def _exchange(
        self, peer: Peer, request: Request, seconds: float, content: bytes | Path, read: Callable[[Transfer], T]
    ) -> T:
        """Send a request and return what `read` makes of the answer's bytes."""
        transfer: Transfer | None = None
        if self._is_closed:
            raise RunDirError("the run is ending")
        try:
            connection = socket.create_connection((peer.address, peer.port), max(0.01, min(seconds, CONNECT_SECONDS)))
            transfer = self._add(connection, seconds)
            transfer.send(request, content)
            answer = msgspec.json.decode(transfer.read_line(), type=_Answer)
            if answer.problem:
                raise RunDirError(answer.problem)
            transfer.unread = answer.bytes
            return read(transfer)
        except RunDirError as error:
            raise RunDirError(f"host {peer.host}: {error}") from None
        except (OSError, msgspec.MsgspecError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RunDirError(f"host {peer.host} (address {peer.address}, port {peer.port}): {why}") from None
        finally:
            if transfer is not None:
                self._drop(transfer)

    # ---- the server

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._slots.acquire()
            try:
                connection = listener.accept()[0]
            except OSError:
                if self._is_closed:
                    return
                self._slots.release()
                time.sleep(0.1)  # no descriptor is free, or the connection was gone before it was accepted
                continue
            threading.Thread(target=self._serve, args=(connection,), name="holdfast-replica", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        transfer = self._add(connection, HELLO_SECONDS)
        try:
            request = msgspec.json.decode(transfer.read_line(), type=Request)
            if not hmac.compare_digest(request.token.encode(), self.local.token.encode()):
                return
            transfer.set_limit(self._seconds)
            transfer.unread = request.bytes
            problem, file = "", None
            try:
                file = self._handle(request, transfer)
            except (RunDirError, OSError) as error:
                problem = str(error)[:2000] or type(error).__name__
            transfer.drain()
            if file is None:
                transfer.send(_Answer(problem))
            else:
                transfer.send(_Answer(bytes=durable.retry_interrupted(os.lstat, file).st_size), file)
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            log.debug("holdfast: rank %d ended a connection: %s", self.local.rank, error)
        finally:
            self._drop(transfer)
            self._slots.release()

    def _add(self, connection: socket.socket, seconds: float) -> Transfer:
        transfer = Transfer(connection, seconds)
        self._transfers.add(transfer)
        if self._is_closed:
            transfer.close()
        return transfer

    def _drop(self, transfer: Transfer) -> None:
        transfer.close()
        self._transfers.discard(transfer)
