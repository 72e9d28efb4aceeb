"""Keys of a small run, also such as the command does not make: expired ones."""

from spes_mega.security.command import write_keys


def make_keys(out, nodes=2, hosts=("hub.example.org",), days=1):
    """The directory that `spes-mega keys new` makes; with negative `days`, of certificates that have expired."""
    write_keys(out, nodes, hosts, days)
    return out
