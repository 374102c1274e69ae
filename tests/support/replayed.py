"""Isolated replay of the calls of a rank, one after another."""

from telechat_moe.tools.align.judge.collectives import kind_of
from telechat_moe.tools.align.judge.replay import replay_call


def replay(dump):
    """Yield the verdicts of each operator of a rank, in the order of the dump."""
    for call in dump.calls.values():
        if call.kind == "api" and kind_of(call) is None and not call.only_numbers:
            yield replay_call(call, dump.calls.get(call.forward_key))
