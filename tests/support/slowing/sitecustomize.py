"""Python imports this at its start where a test says so: one rank of a run has a slow reader, or its messages leave late.

TELECHAT_MOE_SLOW is ``RANK READER_S LINK_S``, seconds a batch and seconds a message.
"""

import os
import time

RANK, *SECONDS = os.environ["TELECHAT_MOE_SLOW"].split()
READER_S, LINK_S = map(float, SECONDS)


def slow_down() -> None:
    from telechat_moe.data.shared import FollowingLoader
    from telechat_moe.graph import links
    from telechat_moe.ops import native

    read, connect = FollowingLoader.__next__, links.link

    def read_slowly(self: FollowingLoader):
        time.sleep(READER_S)
        return read(self)

    def connect_slowly(*given) -> None:
        connect(*given)
        native.load().telechat_link_trial(LINK_S, 0.0, 0)

    FollowingLoader.__next__, links.link = read_slowly, connect_slowly


if os.environ.get("RANK_ID") == RANK and os.environ.get("MS_ROLE") == "MS_WORKER":
    slow_down()
