"""A real TCP line to a hub that can be silent, slow, late, or cut, and that counts what it passes on."""

import contextlib
import socket
import threading
import time


class Relay:
    def __init__(self, target):
        self.target = target  # another one from the next connection on, if it is set anew
        self.passed = {"up": 0, "down": 0}
        self.bytes_per_s = None
        self.delay_s = 0.0
        self._cut_at = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self):
        """Connections stay, and nothing is passed on."""
        self._open.clear()

    def speak(self):
        self._open.set()

    def cut_after(self, way, count):
        """When so many more bytes have gone that way, all connections break, once."""
        with self._lock:
            self._cut_at[way] = self.passed[way] + count

    def cut(self):
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for sockets in pairs:
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            node = self._listener.accept()[0]
            host, _, port = self.target.rpartition(":")
            try:
                hub = socket.create_connection((host, port))
            except OSError:
                node.close()
                continue
            with self._lock:
                self._pairs.append((node, hub))
            for way, source, sink in (("up", node, hub), ("down", hub, node)):
                threading.Thread(target=self._pass_on, args=(way, source, sink), daemon=True).start()

    def _pass_on(self, way, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                if self.bytes_per_s or self.delay_s:
                    time.sleep(self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0))
                sink.sendall(data)
                if self._count(way, len(data)):
                    self.cut()
            sink.shutdown(socket.SHUT_WR)

    def _count(self, way, count):
        with self._lock:
            self.passed[way] += count
            due = way in self._cut_at and self.passed[way] >= self._cut_at[way]
            if due:
                del self._cut_at[way]
            return due
