"""A plugin of pytest: load the native library that ``OTHER_LIBRARY`` names in place of the installed one."""

import os
from pathlib import Path

from telechat_moe.ops import native

native.LIBRARY = Path(os.environ["OTHER_LIBRARY"])
