"""`spes-mega status`: what a running hub is doing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from spes_mega.client.status import read_status
from spes_mega.outer.ownership import ranges
from spes_mega.security.access import TOKEN_VARIABLE, exposed, read_access
from spes_mega.sizes import megabytes


@click.command("status")
@click.option("--hub", "address", required=True, metavar="HOST:PORT", help="Where the hub listens.")
@click.option("--keys", type=click.Path(path_type=Path), help="Directory with keys: DIR/watch, or those of a node.")
@click.option("--token-file", type=click.Path(path_type=Path), help=f"File with the token; or set {TOKEN_VARIABLE}.")
@click.option("--insecure", is_flag=True, help="Speak to another machine without TLS.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for a hub that does not answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    address: str, keys: Path | None, token_file: Path | None, insecure: bool, timeout: float, as_json: bool
) -> None:
    """Show the round, the nodes, merges, and pushes that were refused and why."""
    access = read_access(address, keys, token_file, insecure)
    for warning in exposed(keys, token_file):
        click.echo(warning, err=True)
    status = read_status(address, access, timeout)
    click.echo(json.dumps(status) if as_json else "\n".join(describe(status)))


def describe(status: dict[str, Any]) -> Iterator[str]:
    """A status as lines of text."""
    yield (
        f"{status['name']}: round {status['round']}/{status['num_rounds']}  step {status['step']}/{status['steps']}  "
        f"merges {status['merges']}  (recipe {status['digest'][:12]})"
    )
    if status["trouble"]:
        yield f"  waiting: {status['trouble']}"
    if status["waiting_for"]:
        nodes = ", ".join(map(str, status["waiting_for"]))
        yield f"open for {status['round_seconds']:.0f} s, waiting for the push of: {nodes}"
    for node in status["nodes"]:
        last = "nothing yet" if node["last_pushed_round"] is None else f"round {node['last_pushed_round']}"
        yield (
            f"  node {node['node']}  {node['state']}{', absent' if node['absent'] else ''}  "
            f"experts {ranges(node['experts'])}  last pushed {last}  "
            f"up {megabytes(node['bytes_up'])}  down {megabytes(node['bytes_down'])}"
            + ("" if node["update_norm"] is None else f"  norm of its update {node['update_norm']:.6g}")
        )
    yield from _rounds(status["rounds"])
    for rejection in status["rejected"]:
        yield f"  refused: push of node {rejection['node']} for round {rejection['round']}: {rejection['reason']}"


def _rounds(rounds: list[dict[str, Any]]) -> Iterator[str]:
    for record in rounds:
        if record["round"]:
            merged = "" if record["merge_alpha"] is None else _merged(record)
            yield (
                f"  round {record['round']}  step {record['step']}  nodes {','.join(map(str, record['nodes']))}  "
                f"{record['seconds']:.1f} s  up {megabytes(record['bytes_up'])}  "
                f"down {megabytes(record['bytes_down'])}{merged}"
            )


def _merged(record: dict[str, Any]) -> str:
    similarity = "" if record["similarity"] is None else f", similarity {record['similarity']:.3f}"
    return f"  merged (alpha {record['merge_alpha']:.3g}{similarity})"
