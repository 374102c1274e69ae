"""Run ``msrun`` without ``os.system``: ``python -m telechat_moe.launch.msrun MSRUN ARGUMENT...``.

After a failure msrun hands the path of its logs to a shell, unquoted, to show lines of the scheduler's log.
``LaunchNode.msrun`` puts the recipe's ``output_dir`` into that path.
"""

import os
import runpy
import sys


def _no_shell(command: str) -> int:
    text = "lines of scheduler.log are not shown; it is in the folder of --log_dir"
    sys.stderr.write(f"msrun: {text}\n")
    return 0


if __name__ == "__main__":
    os.system = _no_shell
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
