"""`python -m telechat_moe.cli`."""

import sys

from telechat_moe.cli import main

sys.exit(main())
