"""Addresses on command lines: HOST:PORT, and nothing that would be found out only when it does not answer."""

import ipaddress
import re
import socket

from spes_mega.errors import AccessError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def host_port(address: str, option: str, lowest_port: int = 1) -> tuple[str, int]:
    """Host, an IPv6 address without its brackets, and port.

    Raises:
        AccessError: it is none; the message names the option and says what is wrong.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not re.fullmatch(r"[0-9]{1,5}", port) or not lowest_port <= int(port) <= 65535:
        raise _refusal(address, option, f"the port is a number from {lowest_port} to 65535")
    if host.startswith("[") and host.endswith("]"):
        if not _is_ipv6(host[1:-1]):
            raise _refusal(address, option, f"{host} is no IPv6 address")
        _, _, interface = host[1:-1].partition("%")
        if interface and interface not in _interfaces():
            raise _refusal(address, option, f"there is no network interface {interface}")
        return host[1:-1], int(port)
    if "/" in address:
        raise _refusal(address, option, "without a scheme (http://) or a path")
    if ":" in host:
        raise _refusal(address, option, "an IPv6 address stands in brackets, as in [::1]:7070")
    if not _is_name_or_ipv4(host):
        raise _refusal(address, option, f"{host!r} is neither a name nor an IPv4 address")
    return host, int(port)


def _refusal(address: str, option: str, reason: str) -> AccessError:
    return AccessError(f"{option} {address}: expected HOST:PORT: {reason}")


def _interfaces() -> set[str]:
    """Names and numbers of this machine's network interfaces."""
    return {str(known) for interface in socket.if_nameindex() for known in interface}


def is_host(text: str) -> bool:
    """Whether this is a name or an address that other machines can call: IPv6 without brackets and interface."""
    return _is_name_or_ipv4(text) or ("%" not in text and _is_ipv6(text))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_name_or_ipv4(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    if labels[-1].isdecimal() or labels[-1].lower().startswith("0x"):  # no name ends so: an IPv4 address is meant
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def own_addresses(listen: str) -> list[str]:
    """All addresses of this machine, as HOST:PORT, that `listen` names.

    Raises:
        AccessError: its host is not this machine.
    """
    host, port = host_port(listen, "--listen", 0)
    try:
        found = [info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError as e:
        raise AccessError(f"--listen {listen}: {host} cannot be resolved: {e.strerror or e}") from e
    own = [str(ip) for ip in dict.fromkeys(found) if _is_own(str(ip))]
    if not own:
        raise AccessError(f"--listen {listen}: {', '.join(map(str, found))} is no address of this machine")
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in own]


def check_free(address: str) -> None:
    """Raise OSError if somebody listens at `address` (IP:PORT), or, if it stands for all addresses, at one of them.

    gRPC listens at what is left of `[::]`, such as IPv4 alone, without a word.
    """
    host, port = host_port(address, "--listen", 0)
    _bind(host, port)


def _is_own(ip: str) -> bool:
    try:
        _bind(ip, 0)
    except OSError:
        return False
    return True


def _bind(ip: str, port: int) -> None:
    """Bind to an address and give it back; `::` has those of IPv4 too. Raise OSError."""
    v6 = ":" in ip
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: connections that linger do not matter
        if v6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(ip != "::"))
        probe.bind((ip, port))
