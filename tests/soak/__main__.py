"""A long run under faults: `make soak`, or `python -m tests.soak --rounds 200 --codec fp32|bf16|int8 --merge`.

A real hub and 8 nodes with made-up training, each behind a line of its own. Every few seconds something fails. In the
end the hub's state has to be what the pushes that it accepted give, its memory must not have grown, and nothing may be
left over.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.hub.fabricated import raw_recipe
from tests.soak.faults import Faults
from tests.soak.hub import SoakHub
from tests.soak.nodes import NODES, Node
from tests.soak.replay import differing, replayed

MODEL = {"num_experts": NODES}
GROWTH_BYTES = 40e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--codec", choices=["fp32", "bf16", "int8"], default="fp32")
    parser.add_argument("--merge", action="store_true", help="every third round ends with a merge of experts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spes-soak-") as folder:
        problems = soak(Path(folder), options)
    for problem in problems:
        print(f"FAILED: {problem}")
    sys.exit(bool(problems))


def soak(folder, options):
    deadlines = {"round_deadline_s": 5, "rpc_deadline_s": 5, "join_deadline_s": 600}
    raw = raw_recipe(
        MODEL,
        {"steps": 10 * options.rounds, "seq_len": 16},
        num_nodes=NODES,
        min_nodes=2,
        wire=options.codec,
        **({"merge_interval": 30, "merge_steps": 10 * options.rounds} if options.merge else {}),
        snapshot_every=50,
        **deadlines,
    )
    began = time.monotonic()
    hub = SoakHub(folder, raw)
    nodes = [Node(node, raw, hub.address) for node in range(NODES)]
    faults = Faults(hub, nodes, options.seed)
    for node in nodes:
        node.start()
    while (round_ := hub.round()) < options.rounds:
        # Late ones would leave the last hub no time in which its memory could grow.
        faults.next(hubs_too=round_ < options.rounds * 2 // 3)
    for node in nodes:
        node.join(120)
    problems = [f"node {node.node} did not end" for node in nodes if node.is_alive()]
    problems += [] if hub.end() == 0 else [f"the hub ended with {hub.returncode}: {hub.output[-500:]}"]
    problems += list(check(folder / "state", hub, nodes, options))
    figures = {
        "rounds": options.rounds,
        "codec": options.codec,
        "merging": options.merge,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "faults": faults.counts,
        "lives_of_nodes": sum(node.lives for node in nodes),
        "lives_of_the_hub": hub.lives,
        "hub_rss_bytes": hub.rss_figures(),
        "problems": len(problems),
    }
    print(json.dumps(figures, indent=1))
    return problems


def check(state, hub, nodes, options):
    records = [json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines()]
    if [record["round"] for record in records] != list(range(1, options.rounds + 1)):
        yield f"rounds {[record['round'] for record in records]}"
        return
    pushes = [{n: nodes[n].sent[record["round"] - 1] for n in record["nodes"]} for record in records]
    alphas = [record["merge_alpha"] for record in records]
    if options.merge and not any(alphas):
        yield "no experts were merged"
    expected = replayed(nodes[0].recipe, hub.initial, pushes, alphas)
    yield from differing(state / f"snapshots/round-{options.rounds:06d}", expected)
    kept = sorted(path.relative_to(state).as_posix() for path in state.glob("[rp]*s/*"))
    last = [f"pushes/{options.rounds:06d}", *(f"rounds/{n:06d}" for n in (options.rounds - 1, options.rounds))]
    if kept != last:
        yield f"left over: {kept}"
    if left := [*map(str, state.glob("**/.*")), *map(str, state.glob("pushes/*/*"))]:
        yield f"left over: {left}"
    early, late = hub.rss_figures()
    if late - early > GROWTH_BYTES:
        yield f"the hub's memory grew from {early} to {late} bytes"


if __name__ == "__main__":
    main()
