"""What the hub prints: one plain line an event, or one JSON object."""

import json
from dataclasses import asdict
from typing import Any

import click

from spes_mega.hub.state.ledger import RoundRecord
from spes_mega.quoting import printable
from spes_mega.sizes import megabytes


class Console:
    """Prints events as text, or with `as_json` as JSON lines with an `event` key."""

    def __init__(self, as_json: bool = False) -> None:
        self._as_json = as_json

    def say(self, event: str, text: str, **fields: Any) -> None:
        """One event; `fields` are what a program would want of it."""
        click.echo(json.dumps({"event": event, **fields}) if self._as_json else printable(text, None))

    def round(self, record: RoundRecord, num_rounds: int, num_nodes: int, aggregation_s: float) -> None:
        """One closed round."""
        missing = f" of {num_nodes}" if len(record.nodes) < num_nodes else ""
        merged = f"  merged experts (alpha {record.merge_alpha:.3g})" if record.merge_alpha is not None else ""
        text = (
            f"round {record.round}/{num_rounds}  step {record.step}  "
            f"nodes {','.join(map(str, record.nodes))}{missing}  "
            f"{record.seconds:.1f} s ({aggregation_s:.1f} s averaging)  "
            f"up {megabytes(record.bytes_up)}  down {megabytes(record.bytes_down)}{merged}"
        )
        self.say("round", text, **asdict(record), aggregation_seconds=aggregation_s)
